"""What the ranks of the test pool run to show LoRAs on a mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.ipc.messages import LoraSpec, ModelSpec
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.wan import read_wan_file
from devtools.mesh_runs import (
    Case,
    Inputs,
    LocalJob,
    Schedule,
    build_local_runner,
    build_request,
    mesh_degrees,
)
from workers.job import JobStats
from workers.parallel.agreement import Agreement
from workers.parallel.fsdp import local_part
from workers.runner import PlaneRunner


@dataclass(frozen=True, kw_only=True)
class RunOnRank:
    """One job: its result, what it read, and a digest of each parameter that the rank holds after it.

    error: what it ended with instead.
    """

    result: Tensor
    bytes_read: int
    digests: dict[str, str]
    error: str = ""


def run_specs(
    rank: int,
    mesh: str,
    specs: Sequence[ModelSpec],
    inputs: Inputs,
    schedule: Schedule,
    fresh: bool = False,
) -> list[RunOnRank]:
    """A job for each of `specs`, one after another on one runner, or each on a new one."""
    runner, agreement = build_local_runner(rank, mesh)
    runs = []
    for spec in specs:
        if fresh:
            runner, agreement = build_local_runner(rank, mesh)
        try:
            result, stats = run_on(runner, agreement, mesh, spec, inputs, schedule)
        except WanDistError as error:
            runs.append(
                RunOnRank(
                    result=torch.empty(0),
                    bytes_read=0,
                    digests={},
                    error=f"{type(error).__name__}: {error}",
                )
            )
            continue
        assert runner._transformers.model.held is not None
        fsdp = runner._plane.for_mesh(mesh_degrees(mesh)).fsdp
        digests = {
            name: digest(local_part(parameter, fsdp)[0])
            for name, parameter in runner._transformers.model.held.loaded.model.named_parameters()
        }
        runs.append(RunOnRank(result=result, bytes_read=stats.bytes_read, digests=digests))
    return runs


def merged_weights(spec: ModelSpec, *loras: LoraSpec) -> dict[str, Tensor]:
    """The parameters that one process holds after a job with `loras` merged besides those of the spec."""
    spec = replace(spec, loras=(*spec.loras, *loras))
    inputs = Case(name="any", frames=1, height=4, width=4).inputs(
        read_wan_file(read_model_file(spec.path)).shape
    )
    runner, agreement = build_local_runner(0, "single")
    one_step = Schedule(solver="euler", sigmas=(0.7, 0.0), guidance=1.0)
    run_on(runner, agreement, "single", spec, inputs, one_step)
    assert runner._transformers.model.held is not None
    held = runner._transformers.model.held.loaded.model
    return {name: value.detach().clone() for name, value in held.named_parameters()}


def run_on(
    runner: PlaneRunner,
    agreement: Agreement,
    mesh: str,
    spec: ModelSpec,
    inputs: Inputs,
    schedule: Schedule,
) -> tuple[Tensor, JobStats]:
    """One job; its result is filled on rank 0."""
    request, tensors = build_request(spec, inputs, schedule, mesh=mesh)
    stats = runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
    return tensors[-1], stats


def digest(values: Tensor) -> str:
    raw = values.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
