"""Steps of a job that end alike on every rank: a local phase with its vote, a load, a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from comfy_wan_dist.ipc.errors import InsufficientMemoryError, JobCancelled

from .checkpoint.sharing import Milestone
from .loop import Job
from .parallel.agreement import OutOfStep

T = TypeVar("T")


def together(job: Job, phase: Callable[[], T]) -> T:
    """Run a local phase, then vote: it returns on every rank or raises the same error on every rank.

    Collectives: one vote. A ConfigError on any rank is an answer, and the group lives on. After OutOfStep, which it
    raises, there is no vote, and the group must end.
    """
    error: Exception | None = None
    try:
        with memory_errors():
            result = phase()
    except OutOfStep:
        raise
    except Exception as caught:  # whatever it is, the other ranks must hear of it before they go on
        error = caught
    job.agree(error)
    return result


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise a device's lack of memory as InsufficientMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as caught:
        raise InsufficientMemoryError(
            f"a device ran out of memory: {str(caught).splitlines()[0]} Use a mesh with more ranks, or a smaller video"
        ) from caught


def load_milestone(job: Job, *, turn: int = 0, turns: int = 1) -> Milestone:
    """Reports how far a load is. Collectives: one vote, where errors and a stop are heard on every rank.

    turn: of a job's loads, which come one after the other and have about as much to read, the number of this one.
    """

    def milestone(done: int, total: int, error: Exception | None) -> None:
        if error is None and job.cancel_requested():
            error = JobCancelled("the job was stopped while the model was loading")
        job.agree(error)
        if total:
            job.report("load", turn * total + done, turns * total)

    return milestone


def stop_if_asked(job: Job) -> None:
    """Raise JobCancelled on every rank once any rank has been told to stop. Collectives: one vote."""
    if job.agree_stop():
        raise JobCancelled("the job was stopped on request")
