"""Pipeline parallelism on paper: which blocks a stage holds, and when it works on which micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from .shards import ShardRange, shard_range


def stage_blocks(num_layers: int, *, stages: int, stage: int) -> ShardRange:
    """The contiguous blocks of a stage; earlier stages hold one more where it does not divide."""
    return shard_range(num_layers, parts=stages, rank=stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Stage `stage` works on micro-batch `micro_batch` in time slot `time`."""

    stage: int
    micro_batch: int
    time: int


def forward_schedule(*, stages: int, micro_batches: int) -> tuple[Slot, ...]:
    """Micro-batches enter one after another; each moves on by a stage per slot."""
    return tuple(
        Slot(stage=stage, micro_batch=batch, time=stage + batch)
        for stage in range(stages)
        for batch in range(micro_batches)
    )


def bubble(*, stages: int, micro_batches: int) -> float:
    """Share of the stages' time that is spent waiting, with stages of equal length: (p - 1) / (m + p - 1)."""
    slots = forward_schedule(stages=stages, micro_batches=micro_batches)
    length = 1 + max(slot.time for slot in slots)
    return 1 - len(slots) / (stages * length)
