"""A group's private folder, which no other user can enter: the token, the socket and the stores lie there."""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from ..ipc.paths import SOCKET_NAME, TOKEN_NAME

OTHER_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
_MAX_SOCKET_PATH = 100  # bytes; Linux allows 107
_ROOM = 2**20


def same_secret(one: str, other: str) -> bool:
    """Comparison that takes as long wherever the two differ."""
    return hmac.compare_digest(one.encode(), other.encode())


class PrivateFolder:
    """A new folder of mode 0700 with the group's token in it. The token is on no command line, which all can read.

    It lies with the temporary files, or where these find no room, in another place for such. Raises OSError.
    """

    def __init__(self, *, token: str | None = None) -> None:
        """token: of the group that this one is a part of; a new one is made up without."""
        self.token = secrets.token_hex(32) if token is None else token
        refusals = []
        for place in ("", *OTHER_PLACES):
            folder = place
            try:
                folder = (
                    place or tempfile.gettempdir()
                )  # which finds none where it can write nowhere
                self._make(folder)
                return
            except OSError as error:
                refusals.append(f"{folder or 'temporary files'}: {error.strerror}")
        raise OSError(
            f"no folder for temporary files takes a group's: {'; '.join(refusals)}; let TMPDIR name one that does"
        )

    def _make(self, place: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="wan-dist-", dir=place))
        try:
            if len(os.fsencode(self.path / SOCKET_NAME)) > _MAX_SOCKET_PATH:
                raise OSError(errno.ENAMETOOLONG, "too long a path for a socket")
            descriptor = os.open(
                self.path / TOKEN_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
            )
            with os.fdopen(descriptor, "w") as file:
                # Room for the stores and what ranks print, too.
                os.posix_fallocate(descriptor, 0, _ROOM)
                os.ftruncate(descriptor, 0)
                file.write(self.token)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
