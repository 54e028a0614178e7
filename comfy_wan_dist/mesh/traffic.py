"""What each rank sends: every collective of a job.

Bytes are counted as the ledger counts them: the size of what the rank puts into the operation. `sent_bytes` says how
much of it crosses the rank's link. Uneven shards are exact, rows that fill up a shorter shard included.
Not covered: votes and heartbeats, which the ledger leaves out too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from .degrees import MeshDegrees
from .dtypes import BY_NAME
from .memory import block_bytes, block_packings
from .shape import HEAD_DIM
from .workload import Counting, RankShare, Workload, rank_share

STATE = "float32"
"""Dtype of latents, predictions and norm sums, whatever the weights' dtype is."""


class When(enum.Enum):
    """How often a transfer's `calls` happen."""

    JOB = "job"
    STEP = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """`calls` equal collectives of one rank, each over `bytes`, in every step or once in a job."""

    what: str
    op: str
    axis: str
    ranks: int
    dtype: str
    bytes: int
    calls: int
    when: When

    def total_calls(self, steps: int) -> int:
        return self.calls * (steps if self.when is When.STEP else 1)

    @property
    def sent_bytes(self) -> float:
        """Bytes of one call that cross the rank's link with the usual ring or pairwise algorithms."""
        others = self.ranks - 1
        share = {
            "all_reduce": 2 * others / self.ranks,
            "reduce_scatter": others / self.ranks,
            "all_to_all": others / self.ranks,
            "all_gather": others,
            "send": 1,
            "broadcast": 1,
        }
        return share[self.op] * self.bytes


@dataclass(frozen=True, slots=True)
class _Collective:
    """One thing that ranks send each other."""

    what: str
    op: str
    axis: str

    def over(
        self,
        share: RankShare,
        items: int,
        *,
        calls: int,
        dtype: str = STATE,
        when: When = When.STEP,
    ) -> Transfer:
        """items: numbers of `dtype` that the rank puts into each of `calls`."""
        degrees = share.degrees
        return Transfer(
            what=self.what,
            op=self.op,
            axis=self.axis,
            ranks=degrees.replicas if self.axis == "fsdp" else degrees.degree(self.axis),
            dtype=dtype,
            bytes=items * BY_NAME[dtype].bytes,
            calls=calls,
            when=when,
        )


TEXT_BLOCKS = _Collective("blocks, for the text's keys and values", "all_gather", "fsdp")
FORWARD_BLOCKS = _Collective("blocks, for each forward", "all_gather", "fsdp")
TEXT_NORMS = _Collective("sums of text key norms", "all_reduce", "tp")
RESIDUAL = _Collective("residual to the next stage", "send", "pp")
PREDICTIONS = _Collective("predictions to all stages", "broadcast", "pp")
TO_HEADS = _Collective("q, k and v: tokens to heads", "all_to_all", "ulysses")
TO_TOKENS = _Collective("attention's output: heads to tokens", "all_to_all", "ulysses")
KEYS_VALUES = _Collective("keys and values round the ring", "send", "ring")
SELF_NORMS = _Collective("sums of self-attention norms", "all_reduce", "tp")
CROSS_NORMS = _Collective("sums of cross-attention norms", "all_reduce", "tp")
ROW_SUMS = _Collective("row-parallel sums", "all_reduce", "tp")
SP_TOKENS = _Collective("tokens before column layers", "all_gather", "tp")
SP_ROW_SUMS = _Collective("row-parallel sums", "reduce_scatter", "tp")
BRANCHES = _Collective("predictions of the guidance branches", "all_gather", "cfg")
VIDEOS = _Collective("finished videos", "all_gather", "dp")


def transfers(
    job: Workload, degrees: MeshDegrees, rank: int, counting: Counting = Counting.RUN
) -> tuple[Transfer, ...]:
    """Everything that rank `rank` of the job's mesh sends, in the order of a step."""
    share = rank_share(job, degrees, rank)
    parts = (
        _weights(share, counting),
        _text(share, counting),
        _pipeline(share),
        _context(share),
        _tensor(share),
        _step_end(share, counting),
        _job_end(share, counting),
    )
    return tuple(each for each in chain(*parts) if each.ranks > 1 and each.calls)


def _per_prompt(counting: Counting) -> When:
    return When.JOB if counting is Counting.RUN else When.STEP


def _weights(share: RankShare, counting: Counting) -> Iterator[Transfer]:
    job, degrees, stage = share.job, share.degrees, share.place["pp"]
    if not degrees.fsdp:
        return
    for blocks, forwards, when in (
        (TEXT_BLOCKS, len(share.branches), _per_prompt(counting)),
        (FORWARD_BLOCKS, share.forwards, When.STEP),
    ):
        for packing, count in block_packings(job.shape, stages=degrees.pp, stage=stage):
            size = block_bytes(
                job.shape, tp=degrees.tp, parts=degrees.replicas, dtype=job.dtype, packing=packing
            )
            # Norms are float32 whatever the rest is: then the bytes travel as such.
            dtype = job.dtype if job.dtype == "float32" and not any(packing) else "uint8"
            items = size // BY_NAME[dtype].bytes
            yield blocks.over(share, items, dtype=dtype, calls=forwards * count, when=when)


def _text(share: RankShare, counting: Counting) -> Iterator[Transfer]:
    when = _per_prompt(counting)
    for tokens in share.branches:
        yield TEXT_NORMS.over(share, share.text_batch * tokens, calls=share.blocks, when=when)


def _pipeline(share: RankShare) -> Iterator[Transfer]:
    job, tokens = share.job, share.micro_batch * share.shards.sp.size
    if share.is_last_stage:
        yield PREDICTIONS.over(share, share.forwards * tokens * job.shape.token_dim, calls=1)
    else:
        items = tokens * job.shape.dim
        yield RESIDUAL.over(share, items, dtype=job.dtype, calls=share.forwards)


def _context(share: RankShare) -> Iterator[Transfer]:
    job, degrees = share.job, share.degrees
    ring, blocks = share.place["ring"], share.ring_blocks
    # Of one token inside self-attention: its heads after tp, and after Ulysses as well.
    token = share.micro_batch * (job.shape.num_heads // degrees.tp) * HEAD_DIM
    held = token // degrees.ulysses
    moves = [(TO_HEADS, 3 * share.shards.cp.size * token), (TO_TOKENS, blocks[ring] * held)]
    # A negative index: ring ranks count on from the last one.
    moves += [(KEYS_VALUES, 2 * blocks[ring - hop] * held) for hop in range(degrees.ring - 1)]
    for move, items in moves:
        yield move.over(share, items, dtype=job.dtype, calls=share.forwards * share.blocks)


def _tensor(share: RankShare) -> Iterator[Transfer]:
    job, calls = share.job, share.forwards * share.blocks
    tokens = share.micro_batch * share.shards.cp.size
    yield SELF_NORMS.over(share, 2 * tokens, calls=calls)
    yield CROSS_NORMS.over(share, tokens, calls=calls)
    sums = [(ROW_SUMS, tokens)]
    if share.degrees.sp:
        # The longest shard sets the length of all.
        shard = share.micro_batch * max(share.shards.sp.sizes)
        sums = [(SP_TOKENS, shard), (SP_ROW_SUMS, share.degrees.tp * shard)]
    for each, rows in sums:
        yield each.over(share, rows * job.shape.dim, dtype=job.dtype, calls=3 * calls)


def _step_end(share: RankShare, counting: Counting) -> Iterator[Transfer]:
    job, dtype, tokens = share.job, STATE, share.shards.sp.size
    if counting is Counting.LITERATURE:
        dtype, tokens = job.dtype, job.grid.tokens
    if counting is Counting.LITERATURE or job.grid.is_padded:  # padding is of what others have
        yield from _gathers(share, dtype, When.STEP)
    if job.guided and len(share.branches) == 1:
        items = share.samples.size * tokens * job.shape.token_dim
        yield BRANCHES.over(share, items, dtype=dtype, calls=1)


def _job_end(share: RankShare, counting: Counting) -> Iterator[Transfer]:
    if counting is Counting.RUN:
        yield from _gathers(share, STATE, When.JOB)
    items = max(share.samples.sizes) * share.job.grid.tokens * share.job.shape.token_dim
    yield VIDEOS.over(share, items, calls=1, when=When.JOB)


def _gathers(share: RankShare, dtype: str, when: When) -> Iterator[Transfer]:
    """All tokens on every rank, at the width of a latent's token."""
    degrees, shards = share.degrees, share.shards
    cut = [axis for axis in ("ring", "ulysses") if degrees.degree(axis) > 1]
    parts = [(cut[0] if len(cut) == 1 else "cp", shards.cp.sizes)]
    if degrees.sp:
        parts.insert(0, ("tp", shards.sp.sizes))
    item = share.samples.size * share.job.shape.token_dim
    for axis, sizes in parts:
        gather = _Collective("token shards of the latent", "all_gather", axis)
        yield gather.over(share, max(sizes) * item, dtype=dtype, calls=1, when=when)
