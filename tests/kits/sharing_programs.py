"""What the ranks of the test pool run to read a file together: loads, with one rank's trouble or a broken exchange."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from rank_programs import Fault, error_of, load_shard
from torch import Tensor

from comfy_wan_dist.ipc.messages import ModelSpec
from devtools.mesh_runs import (
    Inputs,
    LocalJob,
    Schedule,
    build_local_runner,
    build_request,
    mesh_degrees,
)
from workers.checkpoint.reader import TensorReader
from workers.checkpoint.sharing import ReadGroups, SharedReader
from workers.parallel.collectives import AxisGroup
from workers.parallel.fsdp import local_part
from workers.parallel.groups import PlaneGroups

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Load:
    """parameters: by name the rank's own part, and which rows of the tp shard it is."""

    parameters: Mapping[str, tuple[Tensor, range]]
    bytes_read: int


def load_together(
    rank: int, mesh: str, path: str, *, machines: int = 1, fault: Fault = nullcontext
) -> Load:
    degrees = mesh_degrees(mesh)
    plane = PlaneGroups(layout=degrees, rank=rank)
    model, bytes_read = load_shard(
        plane, path, dtype=torch.bfloat16, machines=machines, fault=fault
    )
    fsdp = plane.for_mesh(degrees).fsdp
    parts = {name: local_part(each, fsdp) for name, each in model.named_parameters()}
    return Load(
        parameters={name: (part.detach().clone(), rows) for name, (part, rows) in parts.items()},
        bytes_read=bytes_read,
    )


def no_broadcast() -> AbstractContextManager[Any]:
    """Whoever does not read keeps what was there."""
    return mock.patch.object(AxisGroup, "broadcast", lambda self, x, sender: x)


def columns_of_the_neighbour() -> AbstractContextManager[Any]:
    """Tensor-parallel ranks hand the columns out in reverse."""
    original = SharedReader._read_with_peers

    def turned(self: SharedReader, target: Any, entry: Any, rows: Any, columns: Any) -> None:
        original(self, target, entry, rows, columns[::-1])

    return mock.patch.object(SharedReader, "_read_with_peers", turned)


def rows_of_the_first_on_all() -> AbstractContextManager[Any]:
    """Each tensor-parallel rank reads what the first one should."""
    original = ReadGroups.__init__

    def alike(self: ReadGroups, **groups: Any) -> None:
        original(self, **{**groups, "peers": replace(groups["peers"], rank=0)})

    return mock.patch.object(ReadGroups, "__init__", alike)


class TroubledJob(LocalJob):
    """Told to stop once a third of the model is loaded."""

    is_told = False

    def report(self, phase: str, done: int, total: int) -> None:
        super().report(phase, done, total)
        self.is_told = phase == "load" and done > total / 3

    def cancel_requested(self) -> bool:
        return self.is_told


def load_with_trouble(
    rank: int,
    mesh: str,
    spec: ModelSpec,
    inputs: Inputs,
    schedule: Schedule,
    troubled: int,
    trouble: str,
) -> tuple[str, str, Tensor]:
    """A job that meets `trouble` on one rank only while it loads, then a whole one with the same runner.

    How both ended, and the second one's result.
    """
    runner, agreement = build_local_runner(rank, mesh)
    request, tensors = build_request(spec, inputs, schedule, mesh=mesh)
    job = LocalJob(tensors, agreement)
    fault: AbstractContextManager[Any] = nullcontext()
    if rank == troubled and trouble == "stop":
        job = TroubledJob(tensors, agreement)
    elif rank == troubled:
        fault = TROUBLES[trouble]()
    with fault:
        first = error_of(lambda: runner.run(request, job))  # type: ignore[arg-type]
    agreement.take_failure()
    second = LocalJob(tensors, agreement)
    ended = error_of(lambda: runner.run(request, second))  # type: ignore[arg-type]
    return first, ended, tensors[-1]


def failing(owner: Any, name: str, error: Exception, *, after: int = 10) -> Fault:
    """A function of `owner` that works `after` times."""

    def fault() -> AbstractContextManager[Any]:
        original, times = getattr(owner, name), iter(range(after))

        def wrapper(*arguments: Any, **named: Any) -> Any:
            if next(times, None) is None:
                raise error
            return original(*arguments, **named)

        return mock.patch.object(owner, name, wrapper)

    return fault


TROUBLES: Mapping[str, Fault] = {
    "read": failing(os, "preadv", OSError(errno.EIO, "Input/output error")),
    "odd": failing(TensorReader, "_pread", KeyError("odd")),
    "all_to_all": failing(AxisGroup, "all_to_all", torch.OutOfMemoryError("no room"), after=2),
    "broadcast": failing(AxisGroup, "broadcast", torch.OutOfMemoryError("no room")),
}
