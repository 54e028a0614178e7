"""Measure what ranks of a `RankPool` reach, and set the planner's seconds against a run's.

The rate comes from forwards of a model of the same shape at another size, on all ranks at once, so that everything
that the planner leaves out (norms, Python) is in it; link and latency come from gloo's own transfers. Runs are timed
in turn with these, and the fastest of each counts: other users of the machine only ever slow a try down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.degrees import MeshDegrees, parse_mesh
from comfy_wan_dist.mesh.flops import rank_flops
from comfy_wan_dist.mesh.shape import PATCH_POSITIONS
from comfy_wan_dist.mesh.workload import Workload
from comfy_wan_dist.planning.hardware import Calibration
from workers.model.tokens import rope_table
from workers.model.wan import TokenRun, WanModel

from .mesh_runs import CPU, Inputs, LocalJob, Schedule, build_local_runner, build_request
from .rank_pool import RankPool

TRIES = 6
MESSAGE_ITEMS = 2**18
"""Float32 numbers of the exchange that is timed: 1 MiB, the size of a small model's activations."""
SMALL_CALLS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMesh:
    """Seconds of a step, and what the ranks reach that took it."""

    step_seconds: float
    calibration: Calibration


def measure_mesh(
    pool: RankPool, *, mesh: str, spec: ModelSpec, inputs: Inputs, other: Workload, steps: int = 2
) -> MeasuredMesh:
    """Runs of `inputs` on a mesh, and a calibration by forwards of `other`, a job of another size."""
    ranks = parse_mesh(mesh)
    assert ranks is not None, "auto is no mesh to run on"
    single = replace(other, guided=False, batch=1, steps=1)
    found = pool.run(ranks.world_size, measure_rank, mesh, spec, inputs, single, steps)
    each = [one.calibration for one in found]
    return MeasuredMesh(
        step_seconds=max(one.step_seconds for one in found),
        calibration=Calibration(
            rate=min(one.rate for one in each),
            memory=min(one.memory for one in each),
            link=min(one.link for one in each),
            latency=max(one.latency for one in each),
        ),
    )


def measure_rank(
    rank: int, mesh: str, spec: ModelSpec, inputs: Inputs, other: Workload, steps: int
) -> MeasuredMesh:
    """One rank's part of `measure_mesh`; all ranks of the mesh must run it."""
    ranks = dist.get_world_size()
    whole = torch.zeros(ranks, MESSAGE_ITEMS // ranks)
    received, small = torch.empty_like(whole), torch.zeros(1)
    source = torch.zeros(16 * 2**20, dtype=torch.uint8)
    target = torch.empty_like(source)

    def small_sums() -> None:
        for _ in range(SMALL_CALLS):
            dist.all_reduce(small)

    work: dict[str, Callable[[], object]] = {
        "run": _run(rank, mesh, spec, inputs, steps),
        "forward": _forward(other),
        "copy": lambda: target.copy_(source),
    }
    if ranks > 1:
        work |= {
            "small": small_sums,
            "exchange": lambda: dist.all_to_all_single(received, whole),
        }
    best = dict.fromkeys(work, float("inf"))
    for _ in range(TRIES):
        for name, do in work.items():
            dist.barrier()
            start = time.perf_counter()
            do()
            best[name] = min(best[name], time.perf_counter() - start)
    latency, link = 0.0, float("inf")
    if ranks > 1:
        latency = best["small"] / SMALL_CALLS
        sent = whole.numel() * whole.element_size() * (ranks - 1) / ranks
        link = sent / max(best["exchange"] - latency, 1e-9)
    return MeasuredMesh(
        step_seconds=best["run"] / steps,
        calibration=Calibration(
            rate=rank_flops(other, MeshDegrees(), 0).step / best["forward"],
            memory=2 * source.numel() / best["copy"],
            link=link,
            latency=latency,
        ),
    )


def _run(rank: int, mesh: str, spec: ModelSpec, inputs: Inputs, steps: int) -> Callable[[], object]:
    """A whole job on a plane that has the model loaded after the first one."""
    runner, agreement = build_local_runner(rank, mesh)
    schedule = Schedule(
        solver="euler",
        sigmas=tuple(1 - index / steps for index in range(steps + 1)),
        guidance=5.0 if inputs.uncond is not None else 1.0,
    )
    request, tensors = build_request(spec, inputs, schedule, mesh=mesh)
    return lambda: runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]


def _forward(job: Workload) -> Callable[[], object]:
    """A forward of one process, its prompt encoded."""
    model = WanModel(job.shape).eval()
    tokens = torch.randn(1, job.grid.tokens, job.shape.in_dim * PATCH_POSITIONS)
    rope = rope_table(job.grid, 0, job.grid.tokens, device=CPU)
    with torch.inference_mode():
        text = model.encode_text(torch.randn(1, job.text_tokens[0], job.shape.text_dim))

    def forward() -> None:
        with torch.inference_mode():
            model(
                tokens,
                timesteps_BR=torch.full((1, 1), 500.0),
                runs=(TokenRun(start=0, stop=job.grid.tokens, row=0),),
                rope=rope,
                text=text,
            )

    return forward
