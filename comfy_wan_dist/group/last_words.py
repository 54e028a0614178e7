"""Why a group died, as well as can be told: from what ranks and machines said, and from who went without a word."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from ..ipc.channel import ChannelClosed, ChannelCut, SocketChannel
from ..ipc.errors import ProtocolError, WanDistError, WorkerDied
from ..ipc.messages import Failed, Message
from .launch import RunningProcesses
from .machines.door import lost_machine

PEER_SETTLE_S = 0.2
MACHINE_SETTLE_S = 1.0


class LastWords:
    """The deaths of one group's processes. is_explained: whether an error already tells the reason."""

    def __init__(self, processes: RunningProcesses) -> None:
        self._processes = processes
        self.is_explained = False

    def named(self, rank: int) -> str:
        return f"rank {rank} of the worker group{self._processes.ranks[rank].place}"

    def of_rank(self, rank: int, cause: ChannelClosed | None = None) -> WorkerDied:
        """What to raise for a rank that is gone: with its machine, if that is gone too."""
        connection = self._processes.ranks[rank]
        machine = self._processes.machines.get(connection.machine)
        if machine is not None and isinstance(cause, ChannelCut):
            return lost_machine(connection.host, cause)
        death = f"{self.named(rank)} ended unexpectedly"
        if machine is not None and machine.channel.has_word_within(MACHINE_SETTLE_S):
            reason = machine.last_word()
            self.is_explained = True
            return type(reason)(f"{death}; {reason}")
        return WorkerDied(death)

    def of_failure(self, rank: int, failed: Failed) -> WorkerDied:
        """What to raise for a rank that says that it fails alone: the loss of another one may be behind it."""
        silent = self._silent_rank(besides=rank)
        if silent is not None:
            return self.of_rank(silent)
        self.is_explained = True
        return WorkerDied(self._quoted(rank, failed))

    def added_to(self, error: WanDistError) -> WanDistError:
        """`error` with what ranks say in messages that nobody has read yet: often the reason."""
        if type(error) is not WorkerDied or self.is_explained:
            return error
        for rank, connection in sorted(self._processes.ranks.items()):
            for message in unread(connection.channel):
                if isinstance(message, Failed) and message.fatal:
                    return WorkerDied(f"{error}; {self._quoted(rank, message)}")
        return error

    def _silent_rank(self, *, besides: int) -> int | None:
        """A rank that is gone without a word, if there is one: the others only report that they lost it."""
        deadline = time.monotonic() + PEER_SETTLE_S
        for rank, connection in sorted(self._processes.ranks.items()):
            if rank == besides or not connection.ends_within(deadline - time.monotonic()):
                continue
            if not any(isinstance(message, Failed) for message in unread(connection.channel)):
                return rank
        return None

    def _quoted(self, rank: int, failed: Failed) -> str:
        return f"{self.named(rank)} failed: {failed.error}: {failed.message}\n{failed.traceback}"


def unread(channel: SocketChannel) -> Iterator[Message]:
    """The whole messages that wait in a channel, as far as they make sense."""
    with contextlib.suppress(TimeoutError, ChannelClosed, ProtocolError):
        while True:
            received = channel.receive(0)
            for descriptor in received.fds:
                os.close(descriptor)
            yield received.message
