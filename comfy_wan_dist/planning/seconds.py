"""Seconds of a step and of a video: arithmetic, plus what is sent, less what overlaps.

Each collective costs a latency and its bytes over the link. Only the ring's transfers and the gathers of weights run
beside arithmetic; a ring's attention comes in parts, whose merging in float32 passes through memory. Of the ranks the
one with the longest shards is counted, of the stages the slowest.
Not covered: other users of a shared bus, and everything whose work is not counted in flops.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..mesh.degrees import MeshDegrees
from ..mesh.flops import rank_flops
from ..mesh.layout import stage_ranks
from ..mesh.traffic import When, transfers
from ..mesh.workload import Workload, bubble, rank_share
from .hardware import Calibration, Device

HIDDEN = 0.5
"""Guess: the share of the ring's transfers that hides behind attention, which slows down meanwhile; and of the weights'
behind everything."""
MERGE_BYTES = 24
"""Read and written to merge one number of a part of the attention: two casts, three reads, a write, in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedSeconds:
    """compute, exchange and waiting are parts of `step`; waiting is the pipeline's bubble. once: before and after."""

    compute: float
    exchange: float
    waiting: float = 0.0
    once: float
    steps: int

    @property
    def step(self) -> float:
        return self.compute + self.exchange + self.waiting

    @property
    def video(self) -> float:
        """The whole job: every video of its batch."""
        return self.steps * self.step + self.once


def predict_seconds(job: Workload, degrees: MeshDegrees, device: Device) -> PredictedSeconds:
    """What a job takes on a mesh of such devices."""
    can = device.performance(job.dtype)
    stages = [_stage(job, degrees, rank, can) for rank in stage_ranks(degrees)]
    slowest = max(stages, key=lambda stage: stage.step)
    # Of m micro-batches a stage waits for p - 1 more; the share that it waits is the bubble.
    forwards = rank_share(job, degrees, 0).forwards
    idle = bubble(stages=degrees.pp, micro_batches=forwards)
    return replace(
        slowest,
        waiting=slowest.step * idle / (1 - idle),
        once=max(stage.once for stage in stages),
    )


def _stage(job: Workload, degrees: MeshDegrees, rank: int, can: Calibration) -> PredictedSeconds:
    """What one stage takes, not counting that it waits for others."""
    flops = rank_flops(job, degrees, rank)
    exchange = beside = weights = once = 0.0
    for transfer in transfers(job, degrees, rank):
        seconds = transfer.calls * (can.latency + transfer.sent_bytes / can.link)
        if transfer.when is When.JOB:
            once += seconds
        elif transfer.axis == "ring":
            beside += seconds
        elif transfer.axis == "fsdp":
            weights += seconds
        else:
            exchange += seconds
    attention = flops.block_calls * flops.block.attention / can.rate
    # What the last part attends to has arrived: nothing is sent meanwhile.
    covered = min(HIDDEN * beside, attention * (degrees.ring - 1) / degrees.ring)
    compute = flops.step / can.rate + _merge_bytes(job, degrees, rank) / can.memory
    return PredictedSeconds(
        compute=compute,
        exchange=exchange + beside - covered + weights - min(HIDDEN * weights, compute),
        once=once + flops.text / can.rate,
        steps=job.steps,
    )


def _merge_bytes(job: Workload, degrees: MeshDegrees, rank: int) -> int:
    """Passed through memory in a step to merge the parts that a ring gives."""
    share = rank_share(job, degrees, rank)
    queries = share.micro_batch * share.ring_blocks[share.place["ring"]]
    width = job.shape.dim // (degrees.tp * degrees.ulysses)
    return (degrees.ring - 1) * share.forwards * share.blocks * queries * width * MERGE_BYTES
