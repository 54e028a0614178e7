"""Where the ranks of a group report: a Unix socket in a folder that no other user can enter.

Who may connect: a process of the same user, started by the group's launcher, that knows the group's
token. The token lies in the folder and is never on a command line, which every user can read.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import shutil
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..ipc.channel import ChannelClosed, SocketChannel
from ..ipc.errors import ProtocolError
from ..ipc.messages import Hello
from ..ipc.paths import SOCKET_NAME, TOKEN_NAME
from .process import ProcessHandle, parent_pid

HELLO_TIMEOUT_S = 10.0

_CREDENTIALS = struct.Struct("3i")
_MAX_SOCKET_PATH = 100  # bytes; Linux allows 107

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankConnection:
    """A rank that has said hello."""

    rank: int
    channel: SocketChannel
    process: ProcessHandle


class Listener:
    """The private folder, and the socket in it."""

    def __init__(self, *, world_size: int) -> None:
        self._world_size = world_size
        self._token = secrets.token_hex(32)
        self.folder = Path(tempfile.mkdtemp(prefix="wan-dist-"))
        if len(os.fsencode(self.folder / SOCKET_NAME)) > _MAX_SOCKET_PATH:
            self.folder.rmdir()
            self.folder = Path(tempfile.mkdtemp(prefix="wan-dist-", dir="/tmp"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            descriptor = os.open(
                self.folder / TOKEN_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
            )
            with os.fdopen(descriptor, "w") as file:
                file.write(self._token)
            self._socket.bind(str(self.folder / SOCKET_NAME))
            self._socket.listen(world_size)
            self._socket.setblocking(False)
        except BaseException:
            self.close()
            self.remove_folder()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self, *, launcher_pid: int) -> RankConnection | None:
        """Take a connection and hear its Hello. None if there is none, or if it may not be here."""
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return None
        channel = SocketChannel(connection)
        process = None
        try:
            pid, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.getuid():
                raise ProtocolError(f"user {uid} connected")
            process = ProcessHandle(pid)
            # After the handle is open: now it is certain whose parent that is.
            if parent_pid(pid) != launcher_pid:
                raise ProtocolError(
                    f"process {pid} connected, which the group's launcher did not start"
                )
            hello = channel.receive(HELLO_TIMEOUT_S).message
            if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token, self._token):
                raise ProtocolError(f"process {pid} does not know the token")
            if not 0 <= hello.rank < self._world_size or hello.pid != pid:
                raise ProtocolError(
                    f"process {pid} calls itself rank {hello.rank}, process {hello.pid}"
                )
        except (ProtocolError, ChannelClosed, TimeoutError, OSError) as error:
            logger.warning("refused a connection to the worker group: %s", error)
            channel.close()
            if process is not None:
                process.close()
            return None
        return RankConnection(rank=hello.rank, channel=channel, process=process)

    def close(self) -> None:
        self._socket.close()

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
