"""Where the ranks of a group report: a Unix socket in a folder that no other user can enter.

Who may connect: a process of the same user, started by the group's launcher, that knows the group's
token. Ranks of other machines come in elsewhere (machines/door.py).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from dataclasses import dataclass

from ..ipc.channel import ChannelClosed, SocketChannel
from ..ipc.errors import ProtocolError
from ..ipc.messages import Hello
from ..ipc.paths import SOCKET_NAME
from .folder import PrivateFolder, same_secret
from .process import ProcessHandle, parent_pid

HELLO_TIMEOUT_S = 10.0

_CREDENTIALS = struct.Struct("3i")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankConnection:
    """A rank that has said hello.

    process: None on another machine, whose number is `machine` and whose name is `host`.
    """

    rank: int
    pid: int
    channel: SocketChannel
    process: ProcessHandle | None
    machine: int = 0
    host: str = ""

    @property
    def place(self) -> str:
        """For messages: nothing on this machine, else which one it is."""
        return f" on machine {self.host}" if self.host else ""

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the rank is gone, by then."""
        if self.process is not None:
            return self.process.wait(timeout_s)
        return self.channel.ends_within(timeout_s)

    def close(self) -> None:
        self.channel.close()
        if self.process is not None:
            self.process.close()


class Listener:
    """The socket in the private folder."""

    def __init__(self, folder: PrivateFolder, *, world_size: int) -> None:
        """world_size: ranks 0..world_size-1 may report here."""
        self._world_size = world_size
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(folder.path / SOCKET_NAME))
            self._socket.listen(world_size)
            self._socket.setblocking(False)
        except BaseException:
            self.close()
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
            if not isinstance(hello, Hello) or not same_secret(hello.token, self._folder.token):
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
        return RankConnection(rank=hello.rank, pid=pid, channel=channel, process=process)

    def close(self) -> None:
        self._socket.close()
