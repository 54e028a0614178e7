"""Stopwatches for one process, and for ranks that start together."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
START_TIMEOUT_S = 600.0


def stopwatch(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed


def slowest_rank(
    run: Callable[[], object], pace: dist.ProcessGroup, *, is_idle: bool = False
) -> Callable[[], float]:
    """Start `run` on all ranks together; seconds of the slowest one, equal on all ranks."""
    measure = stopwatch(run)

    def timed() -> float:
        dist.barrier(group=pace)
        seconds = torch.tensor([0.0 if is_idle else measure()], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=pace)
        return float(seconds)

    return timed
