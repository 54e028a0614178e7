"""Ctrl-C reaches what tests and tools start, also where it is ignored, as in a shell's background job."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from devtools.interruptible import interruptible

# Says how SIGINT stands, then waits for it.
WAITER = """
import os, signal, time
print(os.getpid(), callable(signal.getsignal(signal.SIGINT)), flush=True)
time.sleep(60)
"""


@pytest.fixture
def ignoring() -> Iterator[None]:
    """This process as a background job of a shell without job control."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def start(command: list[str]) -> tuple[subprocess.Popen[str], list[str]]:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


@pytest.mark.usefixtures("ignoring")
def test_command_is_ended_by_a_signal_that_its_starter_ignores() -> None:
    process, (pid, has_handler) = start(interruptible([sys.executable, "-c", WAITER]))
    with process:
        assert (int(pid), has_handler) == (process.pid, "True")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT


@pytest.mark.usefixtures("ignoring")
def test_without_it_the_command_ignores_it_too() -> None:
    process, (_, has_handler) = start([sys.executable, "-c", WAITER])
    with process:
        process.kill()
    assert has_handler == "False"
