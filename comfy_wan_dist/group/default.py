"""The groups of ComfyUI's process and the queue for them: the only state that a module of this project holds."""

from __future__ import annotations

import atexit
import os
import threading
from dataclasses import dataclass
from functools import partial

from .registry import GroupRegistry
from .scheduler import Scheduler

EXIT_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroups:
    """Which groups run, and who gets them when."""

    registry: GroupRegistry
    scheduler: Scheduler

    def stop_all(self, *, grace_s: float = 5.0) -> None:
        """End every group and start, and whatever waits for one; wait until nothing is left."""
        self.scheduler.call_off_waiting()
        self.registry.stop_all(grace_s=grace_s)


def build_groups() -> WorkerGroups:
    registry = GroupRegistry()
    return WorkerGroups(registry=registry, scheduler=Scheduler(registry))


_default: WorkerGroups | None = None
_default_lock = threading.Lock()


def default_groups() -> WorkerGroups:
    """ComfyUI's, made at the first call; they end with the process."""
    global _default
    with _default_lock:
        if _default is None:
            _default = build_groups()
            stop = _default.stop_all
            atexit.register(stop, grace_s=EXIT_GRACE_S)
            # What another pack forks leaves the groups to this process.
            os.register_at_fork(after_in_child=partial(atexit.unregister, stop))
        return _default
