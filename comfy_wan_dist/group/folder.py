"""A group's private folder, which no other user can enter: the token, the socket and the stores lie there."""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from ..ipc.paths import SOCKET_NAME, TOKEN_NAME

_MAX_SOCKET_PATH = 100  # bytes; Linux allows 107


def same_secret(one: str, other: str) -> bool:
    """Comparison that takes as long wherever the two differ."""
    return hmac.compare_digest(one.encode(), other.encode())


class PrivateFolder:
    """A new folder of mode 0700 with the group's token in it. The token is on no command line, which all can read."""

    def __init__(self, *, token: str | None = None) -> None:
        """token: of the group that this one is a part of; a new one is made up without."""
        self.token = secrets.token_hex(32) if token is None else token
        self.path = Path(tempfile.mkdtemp(prefix="wan-dist-"))
        if len(os.fsencode(self.path / SOCKET_NAME)) > _MAX_SOCKET_PATH:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix="wan-dist-", dir="/tmp"))
        try:
            descriptor = os.open(
                self.path / TOKEN_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
            )
            with os.fdopen(descriptor, "w") as file:
                file.write(self.token)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
