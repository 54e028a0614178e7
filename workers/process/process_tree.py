"""The processes below this one, and their end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil


def kill_descendants() -> int:
    """SIGKILL every process below this one, never a stranger that got its number; how many it were."""
    processes = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(pid))
    # Those still below us are what psutil has seen, and it would notice another one of the same number.
    below = descendants(os.getpid())
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.pid in below:
                process.kill()
                killed += 1
    return killed


def descendants(ancestor: int) -> set[int]:
    """Living processes below `ancestor`. Others may be hidden, which psutil's own search does not bear."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            status = Path("/proc", entry, "stat").read_bytes()
        except OSError:
            continue
        state, parent = status.rpartition(b")")[2].split()[:2]
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(entry))
    found: set[int] = set()
    below = [ancestor]
    while below:
        new = set(children.get(below.pop(), ())) - found
        found |= new
        below += new
    return found
