"""A job as its runner sees it: its mesh, its conditions, and the steps that end alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError, InsufficientMemoryError, JobCancelled
from comfy_wan_dist.ipc.messages import (
    COND,
    UNCOND,
    Condition,
    LedgerLine,
    Progress,
    Request,
    TensorRef,
    TransformerRequest,
)
from comfy_wan_dist.ipc.shared import SharedBuffer, view_of
from comfy_wan_dist.mesh.degrees import parse_mesh
from comfy_wan_dist.mesh.layout import job_ranks
from workers.checkpoint.sharing import Milestone
from workers.parallel.agreement import Agreement, OutOfStep
from workers.parallel.compile import outside_graphs
from workers.parallel.groups import MeshGroups, PlaneGroups

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStats:
    """What a job cost this rank: bytes asked of model files, the lines of its ledger; the rest as in `Done`."""

    bytes_read: int = 0
    ledger: tuple[LedgerLine, ...] = ()
    peak_bytes: int = 0
    note: str = ""


class Runner(Protocol):
    """What a rank can do. The loop calls it from the main thread only."""

    def run(self, request: Request, job: Job) -> JobStats:
        """Carry out `request`; ranks of ComfyUI's machine write the result into the tensor that the request names."""
        ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """A running job as its runner sees it.

    cancel_requested: whether this rank has been told to stop. The others may not know: use `agree_stop`.
    send_progress: on rank 0 only.
    """

    id: str
    buffers: Sequence[SharedBuffer]
    agreement: Agreement
    cancel_requested: Callable[[], bool]
    send_progress: Callable[[Progress], None] | None

    def tensor(self, ref: TensorRef) -> Tensor:
        """The CPU tensor that `ref` names: on ComfyUI's machine a view on memory shared with it.

        Only the request's result may be written to. Raises ProtocolError if the ref does not fit
        its buffer.
        """
        return view_of(self.buffers, ref)

    def report(self, phase: str, done: int, total: int) -> None:
        """Tell the client how far the job is: one message per call, from rank 0 only."""
        if self.send_progress is not None:
            self.send_progress(Progress(id=self.id, phase=phase, done=done, total=total))

    def agree(self, error: Exception | None) -> None:
        """Vote after a local phase: see `Agreement.agree`. Every rank must call it."""
        self.agreement.agree(error)

    def agree_stop(self) -> bool:
        """Whether any rank has been told to stop; all get one answer. Every rank must call it.

        Once it is True, raise JobCancelled on every rank.
        """
        return self.agreement.agree_stop(self.cancel_requested())

    def agree_least(self, number: int) -> int:
        """The least of the ranks' numbers, the same on every rank. Every rank must call it."""
        return self.agreement.agree_least(number)


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


def together_or_none(job: Job, phase: Callable[[], T | None]) -> T | None:
    """`together`, for a phase that gives None where the rank cannot go on so; then it is None on every rank.

    Collectives: one vote.
    """
    result: T | None = None
    try:
        with memory_errors():
            result = phase()
    except OutOfStep:
        raise
    except Exception as caught:
        job.agree(caught)  # the others hear of it in the vote below
    return result if job.agree_least(int(result is not None)) else None


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


def groups_for(request: TransformerRequest, plane: PlaneGroups) -> MeshGroups:
    """Groups of the request's mesh. Collectives: the making of groups that no earlier job needed.

    Raises ConfigError, MeshError, on all ranks alike, as what they see is the same.
    """
    degrees = parse_mesh(request.mesh)
    if degrees is None:
        raise ConfigError("a job's mesh is auto; name one")
    job_ranks(plane.layout, degrees)
    groups = plane.for_mesh(degrees)
    return outside_graphs(groups) if request.model.compile else groups


def read_conditions(
    conditions: Sequence[Condition], tensor: Callable[[TensorRef], Tensor]
) -> Mapping[str, Mapping[str, Tensor]]:
    """The conditions of each branch by name, their samples in dim 0. Raises ConfigError."""
    named = [(each.branch, each.name) for each in conditions]
    for each in conditions:
        if not 0 <= each.batch_dim < max(1, len(each.tensor.shape)):
            raise ConfigError(
                f"the samples of {each.name} are said to lie in dim {each.batch_dim} of {list(each.tensor.shape)}"
            )
    if len(set(named)) < len(named) or not {branch for branch, _ in named} <= {COND, UNCOND}:
        raise ConfigError(
            f"the conditions are {named}; each must be of {COND} or {UNCOND}, and of one name only once"
        )
    return {
        branch: {
            each.name: tensor(each.tensor).movedim(each.batch_dim, 0)
            for each in conditions
            if each.branch == branch
        }
        for branch in (COND, UNCOND)
    }
