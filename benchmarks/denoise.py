"""Section "denoise": forwards of four blocks on one and two ranks, one thread each, on the CPU.

On one rank our forward is set against diffusers' and ComfyUI's. On two ranks the speed-up of every axis is set against
the ceiling, which is what two independent forwards at once gain over one after the other: two ranks share the
memory's bandwidth, so it is below 2. Ulysses is also set against diffusers' own.

Not covered: more than two ranks, the loop around the forward, devices other than the CPU (gpu.py has those).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from devtools.checkpoints import transformer_weights
from devtools.mesh_runs import relative_error
from devtools.rank_pool import RankPool
from workers.model.tokens import unpatchify
from workers.parallel.groups import PlaneGroups

from .models import ComfyForward, DiffusersForward, Inputs, OurForward, Workload, make_inputs
from .pace import COLLECTIVE_TIMEOUT, START_TIMEOUT_S, slowest_rank, stopwatch
from .timing import Comparison, Row, Sense, build_row, interleave

SECTION = "denoise"
SHAPE = WanShape(dim=1024, ffn_dim=4096, num_layers=4, in_dim=48, out_dim=48)
GRIDS = (LatentGrid(frames=5, rows=16, columns=16), LatentGrid(frames=20, rows=16, columns=16))
DTYPES = (torch.float32, torch.bfloat16)
FEW_TOKENS = 1280

CFG_SHARE = 0.97
ULYSSES_SHARE = {"few": 0.87, "many": 0.95}
TP_SHARE = {"few": 0.78, "many": 0.90}
OF_DIFFUSERS_ULYSSES = {"few": 0.95, "many": 0.98}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""How far outputs may differ, as a part of the largest value, for a comparison of speed to mean anything."""


def measure(*, budget_s: float, report: Callable[[Row], None]) -> None:
    """All rows of the section; `budget_s` is the measured time of each pair of a size and a dtype."""
    workloads = [
        Workload(shape=SHAPE, grid=grid, dtype=dtype) for grid in GRIDS for dtype in DTYPES
    ]
    for workload in workloads:
        for world_size, function in ((1, one_rank), (2, two_ranks)):
            # Processes of their own for each: what one leaves in its heap does not slow the next.
            with RankPool() as pool:
                timeout_s = START_TIMEOUT_S + 3 * budget_s
                answers = pool.run(world_size, function, workload, budget_s, timeout_s=timeout_s)
            for row in answers[0]:
                report(row)


@torch.inference_mode()
def one_rank(rank: int, workload: Workload, budget_s: float) -> tuple[Row, ...]:
    """Rows of one forward of ours against others'."""
    weights, inputs = transformer_weights(workload.shape, seed=1), make_inputs(workload)
    ours = _our_forward(workload, weights, inputs, rank, MeshDegrees())
    others: dict[str, Callable[[], Tensor]] = {
        "diffusers": DiffusersForward(workload, weights, inputs),
        "ComfyUI": ComfyForward(workload, weights, inputs),
    }
    expected = unpatchify(ours(), workload.grid)
    for name, other in others.items():
        _require_equal(name, other(), expected, workload)
    forwards: dict[str, Callable[[], Tensor]] = {
        "ours": ours.with_text,
        "ours, text encoded before": ours,
        **others,
    }
    comparisons = []
    for name in others:
        comparisons.append(
            Comparison(
                case=f"one rank / {name}, {workload.label}",
                ours="ours",
                other=name,
                limit=1.0,
                note="ours encodes the text each time, as theirs does",
            )
        )
        comparisons.append(
            Comparison(
                case=f"one rank / {name}, text encoded before, {workload.label}",
                ours="ours, text encoded before",
                other=name,
                limit=None,
                note="as in the denoise loop, which encodes the text once per prompt",
            )
        )
    things = {name: stopwatch(forward) for name, forward in forwards.items()}
    times = interleave(things, comparisons, budget_s=budget_s)
    return tuple(build_row(SECTION, comparison, times) for comparison in comparisons)


@torch.inference_mode()
def two_ranks(rank: int, workload: Workload, budget_s: float) -> tuple[Row, ...]:
    """Rows of what two ranks gain. Every rank returns the same."""
    weights, inputs = transformer_weights(workload.shape, seed=1), make_inputs(workload)
    single = _our_forward(workload, weights, inputs, rank, MeshDegrees())
    cfg = _our_forward(workload, weights, inputs, rank, MeshDegrees(cfg=2))
    ulysses = _our_forward(workload, weights, inputs, rank, MeshDegrees(ulysses=2))
    tp = _our_forward(workload, weights, inputs, rank, MeshDegrees(tp=2))
    diffusers = DiffusersForward(workload, weights, inputs)
    _enable_ulysses(diffusers)

    expected = single()
    shard = expected.tensor_split(2, dim=1)[rank]
    _require_equal("cfg2", cfg(), expected, workload)
    _require_equal("ulysses2", ulysses(), shard, workload)
    _require_equal("tp2", tp(), expected, workload)
    _require_equal("diffusers", diffusers(), unpatchify(expected, workload.grid), workload)

    pace = dist.new_group(timeout=COLLECTIVE_TIMEOUT)
    things = {
        "alone": slowest_rank(single, pace, is_idle=rank != 0),
        "two at once": slowest_rank(single, pace),
        "cfg2": slowest_rank(cfg, pace),
        "ulysses2": slowest_rank(ulysses, pace),
        "tp2": slowest_rank(tp, pace),
        "ulysses2 with text": slowest_rank(ulysses.with_text, pace),
        "diffusers ulysses2": slowest_rank(diffusers, pace),
    }
    comparisons = two_rank_comparisons(workload)
    times = interleave(things, comparisons, budget_s=budget_s)
    return tuple(build_row(SECTION, comparison, times) for comparison in comparisons)


def two_rank_comparisons(workload: Workload) -> tuple[Comparison, ...]:
    """What is judged on two ranks.

    The ceiling's speed-up is 2 * alone / two at once, an axis' speed-up on one forward is alone / its time, so its
    share of the ceiling is (two at once / 2) / its time: the time alone cancels out. cfg2 does two forwards.
    """
    size = "few" if workload.grid.tokens <= FEW_TOKENS else "many"
    label = workload.label

    def share(axis: str, limit: float, other_part: float) -> Comparison:
        return Comparison(
            case=f"{axis} / ceiling, {label}",
            ours=axis,
            other="two at once",
            other_part=other_part,
            limit=limit,
            sense=Sense.AT_LEAST,
            note="share of the ceiling's speed-up",
        )

    def speed_up(axis: str, other_part: float) -> Comparison:
        return Comparison(
            case=f"{axis} speed-up, {label}",
            ours=axis,
            other="alone",
            other_part=other_part,
            limit=None,
            sense=Sense.AT_LEAST,
            note="one rank's time for the same work over two ranks'",
        )

    return (
        speed_up("two at once", 2.0),
        speed_up("cfg2", 2.0),
        speed_up("ulysses2", 1.0),
        speed_up("tp2", 1.0),
        share("cfg2", CFG_SHARE, 1.0),
        share("ulysses2", ULYSSES_SHARE[size], 0.5),
        share("tp2", TP_SHARE[size], 0.5),
        Comparison(
            case=f"ulysses2 / diffusers, {label}",
            ours="ulysses2 with text",
            other="diffusers ulysses2",
            limit=OF_DIFFUSERS_ULYSSES[size],
            note="ours encodes the text each time, as theirs does",
        ),
        Comparison(
            case=f"ulysses2 / diffusers, text encoded before, {label}",
            ours="ulysses2",
            other="diffusers ulysses2",
            limit=None,
            note="as in the denoise loop, which encodes the text once per prompt",
        ),
    )


def _our_forward(
    workload: Workload,
    weights: Mapping[str, Tensor],
    inputs: Inputs,
    rank: int,
    degrees: MeshDegrees,
) -> OurForward:
    own_rank = rank if degrees.plane_size > 1 else 0
    groups = PlaneGroups(layout=degrees, rank=own_rank).for_mesh(degrees)
    return OurForward(workload, weights, inputs, groups)


def _enable_ulysses(forward: DiffusersForward) -> None:
    from diffusers import ContextParallelConfig

    # It takes the rank modulo the number of accelerators, which is 0 on a CPU.
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        forward.model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))


def _require_equal(name: str, actual: Tensor, expected: Tensor, workload: Workload) -> None:
    error = relative_error(actual.float(), expected.float())
    if error > TOLERANCE[workload.dtype]:
        raise RuntimeError(
            f"{name} and one rank of ours differ by {error:.1e} of the largest value at {workload.label}; "
            f"{TOLERANCE[workload.dtype]:.0e} is allowed: their speeds are not comparable"
        )
