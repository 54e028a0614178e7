"""The processes below this one, and their end."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def kill_descendants() -> int:
    """SIGKILL every process below this one, by pidfd, so never a stranger; how many it were."""
    killed = 0
    for pid in descendants(os.getpid()):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            # Still below us now that its number cannot be reused.
            if pid in descendants(os.getpid()):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed += 1
        except OSError:
            pass
        finally:
            os.close(pidfd)
    return killed


def descendants(ancestor: int) -> set[int]:
    """Living processes below `ancestor`."""
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
        for child in children.get(below.pop(), []):
            if child not in found:
                found.add(child)
                below.append(child)
    return found
