"""Processes held by pidfd, so that a signal never reaches a stranger that got a reused number; and their lifeline."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import threading

import psutil

POLL_S = 0.05


class ProcessHandle:
    """One process, of which `pid` is known to be alive or an unreaped child when this is made.

    Where the system refuses pidfds, as old seccomp profiles and gVisor do, a thread looks for its end each POLL_S.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process: psutil.Process | None = None
        if has_pidfds():
            self._descriptor = os.pidfd_open(pid)
            return
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess as error:
            raise ProcessLookupError(errno.ESRCH, str(error)) from error
        self._descriptor = _end_of(self._process)

    def fileno(self) -> int:
        """Readable once the process has ended."""
        return self._descriptor

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ended within `timeout_s`. Does not reap."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if self._process is None:
                signal.pidfd_send_signal(self._descriptor, number)
            else:
                self._process.send_signal(number)  # which looks when it was started

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def has_pidfds() -> bool:
    """Whether the system allows them."""
    # Without the attribute Python itself was built where there are none.
    with (
        contextlib.suppress(OSError, AttributeError),
        open(os.pidfd_open(os.getpid()), "rb", 0) as pidfd,
    ):
        signal.pidfd_send_signal(pidfd.fileno(), 0)
        return True
    return False


def _end_of(process: psutil.Process) -> int:
    """A descriptor that becomes readable when the process has ended, as a pidfd does."""
    reader, writer = os.pipe()

    def watch() -> None:
        poll = select.poll()
        poll.register(writer, 0)  # an event only once the reader is closed
        try:
            while not _has_ended(process) and not poll.poll(POLL_S * 1000):
                pass
            with contextlib.suppress(BrokenPipeError):  # nobody waits any more
                os.write(writer, b"x")  # closing is not heard while a forked child has a copy
        finally:
            os.close(writer)

    threading.Thread(target=watch, name="process-end", daemon=True).start()
    return reader


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OSError):  # such as too many open files: it will be seen the next time
        return False


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
    """Parent of a process, or None if it is gone or hidden."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.Error:
        return None
