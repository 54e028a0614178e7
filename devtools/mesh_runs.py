"""Sampling on a mesh through the product's own pipeline, without ComfyUI and sockets: what parity is measured on.

Tensors go in and come out in ordinary memory; everything between is what a rank of a worker group runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from comfy_wan_dist.ipc.messages import LedgerLine, ModelSpec, SampleRequest, TensorRef
from comfy_wan_dist.mesh.degrees import MeshDegrees, parse_mesh
from workers.parallel.agreement import Agreement
from workers.parallel.collectives import Ledger
from workers.parallel.groups import MeshGroups, build_groups
from workers.pipeline import PlaneRunner


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a sampler node would hand over: normalised latents and text embeddings, float32."""

    noisy: Tensor
    cond: Tensor
    uncond: Tensor | None = None
    clean: Tensor | None = None
    mask: Tensor | None = None
    frame_mask: Tensor | None = None
    step_noise: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    solver: str
    sigmas: tuple[float, ...]
    guidance: float

    @property
    def timesteps(self) -> tuple[float, ...]:
        return tuple(1000 * sigma for sigma in self.sigmas[:-1])


class LocalJob:
    """The job interface of the pipeline over ordinary tensors."""

    def __init__(self, tensors: list[Tensor], agreement: Agreement) -> None:
        self._tensors = tensors
        self._agreement = agreement
        self.reports: list[tuple[str, int, int]] = []

    def tensor(self, ref: TensorRef) -> Tensor:
        return self._tensors[ref.buffer]

    def report(self, phase: str, done: int, total: int) -> None:
        self.reports.append((phase, done, total))

    def cancel_requested(self) -> bool:
        return False

    def agree(self, error: Exception | None) -> None:
        self._agreement.agree(error)

    def agree_stop(self) -> bool:
        return self._agreement.agree_stop(False)


def model_spec(path: Path, *, dtype: str = "float32", compile: bool = False) -> ModelSpec:
    status = path.stat()
    return ModelSpec(
        path=str(path), file_bytes=status.st_size, mtime_ns=status.st_mtime_ns, dtype=dtype, compile=compile
    )


def build_request(spec: ModelSpec, inputs: Inputs, schedule: Schedule) -> tuple[SampleRequest, list[Tensor]]:
    """The request and the tensors that its refs name; the last one is the result."""
    tensors: list[Tensor] = []

    def ref(tensor: Tensor | None) -> TensorRef | None:
        if tensor is None:
            return None
        tensors.append(tensor)
        return TensorRef(buffer=len(tensors) - 1, offset=0, dtype="float32", shape=tuple(tensor.shape))

    noisy, cond = ref(inputs.noisy), ref(inputs.cond)
    assert noisy is not None
    assert cond is not None
    refs = [ref(t) for t in (inputs.uncond, inputs.clean, inputs.mask, inputs.frame_mask, inputs.step_noise)]
    result = ref(torch.zeros_like(inputs.noisy))
    assert result is not None
    request = SampleRequest(
        id="local",
        model=spec,
        solver=schedule.solver,
        sigmas=schedule.sigmas,
        timesteps=schedule.timesteps,
        guidance=schedule.guidance,
        noisy=noisy,
        cond=cond,
        uncond=refs[0],
        clean=refs[1],
        mask=refs[2],
        frame_mask=refs[3],
        step_noise=refs[4],
        result=result,
    )
    return request, tensors


def sample_rank(
    rank: int,
    mesh: str,
    spec: ModelSpec,
    inputs: Inputs,
    schedule: Schedule,
    sabotage: Callable[[MeshGroups, PlaneRunner], None] | None = None,
) -> tuple[Tensor, tuple[LedgerLine, ...], int]:
    """One rank's run: result (rank 0's is filled), ledger, bytes read."""
    degrees = parse_mesh(mesh)
    assert isinstance(degrees, MeshDegrees)
    groups = build_groups(degrees, rank, Ledger())
    runner = PlaneRunner(groups=groups, device=torch.device("cpu"))
    if sabotage is not None:
        sabotage(groups, runner)
    votes = dist.new_group() if degrees.plane_size > 1 else None
    job = LocalJob([], Agreement(rank=rank, size=degrees.plane_size, group=votes))
    request, tensors = build_request(spec, inputs, schedule)
    job._tensors = tensors
    stats = runner.run(request, job)  # type: ignore[arg-type]
    return tensors[-1], stats.ledger, stats.bytes_read
