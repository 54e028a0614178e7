"""Section "mesh": the planner's seconds against runs, and the bubble of a pipeline, on two CPU ranks of one thread.

A prediction is calibrated by forwards of another size in the same processes (devtools/calibration.py). The bubble is
the share of the stages' time that they spend waiting for each other.
Not covered: more than two ranks, which would share the cores of a small machine, and devices other than the CPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from comfy_wan_dist.mesh.workload import Workload, bubble
from comfy_wan_dist.planning.hardware import cpu_device
from comfy_wan_dist.planning.seconds import predict_seconds
from devtools.calibration import measure_mesh
from devtools.checkpoints import write_transformer
from devtools.mesh_runs import CPU, Case, mesh_degrees, model_spec
from devtools.rank_pool import RankPool
from workers.model.tokens import rope_table
from workers.model.wan import TokenRun, WanModel
from workers.parallel.collectives import AxisGroup
from workers.parallel.groups import PlaneGroups
from workers.parallel.parallelize import cut_model
from workers.parallel.stages import MicroBatch, forward_in_stages

from .timing import Row

SECTION = "mesh"
SHAPE = WanShape(
    dim=1024, ffn_dim=4096, num_layers=4, in_dim=48, out_dim=48, text_dim=64, freq_dim=256
)
GRID = LatentGrid(frames=5, rows=16, columns=16)
OTHER_GRID = LatentGrid(frames=4, rows=14, columns=14)
STEPS = 2
PREDICTED = ("cfg2", "ulysses2", "tp2", "ring2", "pp2")
PREDICTION_LIMIT = 0.30
BUBBLE_LIMIT = 0.05
MICRO_BATCHES = (2, 4)
ROUNDS = 7


def measure(*, budget_s: float, report: Callable[[Row], None]) -> None:
    """All rows of the section. They take a fixed number of tries; `budget_s` bounds each group of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_transformer(path, SHAPE, seed=1)
        for mesh in PREDICTED:
            with RankPool() as pool:
                report(predicted_row(pool, path, mesh))
    for micro_batches in MICRO_BATCHES:
        with RankPool() as pool:
            rounds = pool.run(2, stage_rounds, micro_batches, timeout_s=budget_s)
        report(bubble_row(micro_batches, rounds))


def predicted_row(pool: RankPool, path: Path, mesh: str) -> Row:
    """Planned seconds of a job on a mesh against its run."""
    case = Case(name="video", frames=GRID.frames, height=2 * GRID.rows, width=2 * GRID.columns)
    inputs = case.inputs(SHAPE)
    job = Workload(
        shape=SHAPE,
        grid=GRID,
        steps=STEPS,
        guided=True,
        dtype="float32",
        text_tokens=(inputs.cond.shape[1],) * 2,
    )
    other = Workload(
        shape=SHAPE,
        grid=OTHER_GRID,
        steps=1,
        guided=False,
        dtype="float32",
        text_tokens=job.text_tokens,
    )
    measured = measure_mesh(
        pool, mesh=mesh, spec=model_spec(path), inputs=inputs, other=other, steps=STEPS
    )
    device = cpu_device(ranks=2, memory=2**40, measure=lambda ranks: measured.calibration)
    planned = predict_seconds(job, mesh_degrees(mesh), device).video / STEPS
    error = abs(planned / measured.step_seconds - 1)
    return Row(
        section=SECTION,
        case=f"planned step / run on {mesh}, {GRID.tokens} tokens fp32",
        ours_s=planned,
        other_s=measured.step_seconds,
        ratio=error,
        limit=PREDICTION_LIMIT,
        ok=error <= PREDICTION_LIMIT,
        note="ratio: how far the planned seconds are from the measured ones",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRound:
    """Seconds of one rank in one round of all micro-batches."""

    total: float
    waiting: float


@torch.inference_mode()
def stage_rounds(rank: int, micro_batches: int) -> tuple[StageRound, ...]:
    """One stage of two with equal blocks; every rank must run it."""
    degrees = MeshDegrees(pp=2)
    groups = PlaneGroups(layout=degrees, rank=rank).for_mesh(degrees)
    waits: list[float] = []
    pp = watched(groups.pp, waits)
    model = cut_model(SHAPE, groups, dtype=torch.float32, device=CPU)
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    batches = [micro_batch(model) for _ in range(micro_batches)]
    runs = (TokenRun(start=0, stop=GRID.tokens, row=0),)
    rope = rope_table(GRID, 0, GRID.tokens, device=CPU)
    rounds = []
    for _ in range(ROUNDS + 1):
        waits.clear()
        dist.barrier()
        start = time.perf_counter()
        forward_in_stages(model, batches, runs=runs, rope=rope, pp=pp)
        rounds.append(StageRound(total=time.perf_counter() - start, waiting=sum(waits)))
    return tuple(rounds[1:])


def micro_batch(model: WanModel) -> MicroBatch:
    return MicroBatch(
        tokens=torch.randn(1, GRID.tokens, SHAPE.token_dim),
        timesteps=torch.full((1, 1), 500.0),
        text=model.encode_text(torch.randn(1, 24, SHAPE.text_dim)),
    )


def watched(pp: AxisGroup, waits: list[float]) -> AxisGroup:
    """The same group; what a rank waits for others is added to `waits`, in seconds."""

    class WatchedGroup(AxisGroup):
        def receive(self, out: Tensor, sender: int) -> Tensor:
            start = time.perf_counter()
            received = super().receive(out, sender)
            waits.append(time.perf_counter() - start)
            return received

        def broadcast(self, x: Tensor, sender: int) -> Tensor:
            start = time.perf_counter()
            received = super().broadcast(x, sender)
            if self.rank != sender:
                waits.append(time.perf_counter() - start)
            return received

    return WatchedGroup(**{field.name: getattr(pp, field.name) for field in fields(pp)})


def bubble_row(micro_batches: int, ranks: list[tuple[StageRound, ...]]) -> Row:
    """Waiting as a share of all stages' time, against (p - 1) / (m + p - 1)."""
    shares, totals = [], []
    for stages in zip(*ranks, strict=True):
        totals.append(max(stage.total for stage in stages))
        shares.append(sum(stage.waiting for stage in stages) / (len(stages) * totals[-1]))
    measured, expected = median(shares), bubble(stages=2, micro_batches=micro_batches)
    error = abs(measured - expected)
    return Row(
        section=SECTION,
        case=f"bubble of pp2 with {micro_batches} micro-batches, {GRID.tokens} tokens fp32",
        ours_s=measured * median(totals),
        other_s=median(totals),
        ratio=error,
        limit=BUBBLE_LIMIT,
        ok=error <= BUBBLE_LIMIT,
        rounds=len(shares),
        note=f"ratio: how far the waiting share {measured:.3f} is from (p-1)/(m+p-1) = {expected:.3f}",
    )
