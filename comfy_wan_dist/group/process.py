"""Processes held by pidfd, so that a signal never reaches a stranger that got a reused number; and their lifeline."""

from __future__ import annotations

import contextlib
import os
import select
import signal

import psutil


class ProcessHandle:
    """One process, of which `pid` is known to be alive or an unreaped child when this is made."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Readable once the process has ended."""
        return self._pidfd

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ended within `timeout_s`. Does not reap."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Lifeline:
    """A pipe that a launcher watches: its end is the end of this process, or of what was started.

    Only this process holds the writing end. `reader` is for the launcher to inherit.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def close_reader(self) -> None:
        """Once the launcher has it, or will not."""
        os.close(self.reader)

    def drop(self) -> None:
        """Let the launcher end everything; may be called again."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1


def parent_pid(pid: int) -> int | None:
    """Parent of a process, or None if it is gone."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return None
