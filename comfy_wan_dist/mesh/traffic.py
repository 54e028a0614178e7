"""What each rank sends: every collective of a job.

Bytes are counted as the ledger counts them: the size of what the rank puts into the operation. `sent_bytes` says how
much of it crosses the rank's link. Uneven shards are exact, rows that fill up a shorter shard included.
Not covered: votes and heartbeats, which the ledger leaves out too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

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


def transfers(
    job: Workload, degrees: MeshDegrees, rank: int, counting: Counting = Counting.RUN
) -> tuple[Transfer, ...]:
    """Everything that rank `rank` of the job's mesh sends, in the order of a step."""
    share = rank_share(job, degrees, rank)
    return tuple(
        transfer
        for part in (
            _weights(job, degrees, share, counting),
            _text(job, degrees, share, counting),
            _pipeline(job, degrees, share),
            _context(job, degrees, share),
            _tensor(job, degrees, share),
            _step_end(job, degrees, share, counting),
            _job_end(job, degrees, share, counting),
        )
        for transfer in part
        if transfer.ranks > 1 and transfer.calls
    )


def _weights(
    job: Workload, degrees: MeshDegrees, share: RankShare, counting: Counting
) -> Iterator[Transfer]:
    if not degrees.fsdp:
        return
    once = When.JOB if counting is Counting.RUN else When.STEP
    for what, forwards, when in (
        ("blocks, for the text's keys and values", len(share.branches), once),
        ("blocks, for each forward", share.forwards, When.STEP),
    ):
        for packing, blocks in block_packings(
            job.shape, stages=degrees.pp, stage=share.place["pp"]
        ):
            yield Transfer(
                what=what,
                op="all_gather",
                axis="fsdp",
                ranks=degrees.replicas,
                # Norms are float32 whatever the rest is: then the bytes travel as such.
                dtype=job.dtype if job.dtype == "float32" and not any(packing) else "uint8",
                bytes=block_bytes(
                    job.shape,
                    tp=degrees.tp,
                    parts=degrees.replicas,
                    dtype=job.dtype,
                    packing=packing,
                ),
                calls=forwards * blocks,
                when=when,
            )


def _text(
    job: Workload, degrees: MeshDegrees, share: RankShare, counting: Counting
) -> Iterator[Transfer]:
    when = When.JOB if counting is Counting.RUN else When.STEP
    for tokens in share.branches:
        yield Transfer(
            what="sums of text key norms",
            op="all_reduce",
            axis="tp",
            ranks=degrees.tp,
            dtype=STATE,
            bytes=share.text_batch * tokens * BY_NAME[STATE].bytes,
            calls=share.blocks,
            when=when,
        )


def _pipeline(job: Workload, degrees: MeshDegrees, share: RankShare) -> Iterator[Transfer]:
    tokens = share.micro_batch * share.shards.sp.size
    if not share.is_last_stage:
        yield Transfer(
            what="residual to the next stage",
            op="send",
            axis="pp",
            ranks=degrees.pp,
            dtype=job.dtype,
            bytes=tokens * job.shape.dim * job.item_bytes,
            calls=share.forwards,
            when=When.STEP,
        )
    else:
        yield Transfer(
            what="predictions to all stages",
            op="broadcast",
            axis="pp",
            ranks=degrees.pp,
            dtype=STATE,
            bytes=share.forwards * tokens * job.shape.token_dim * BY_NAME[STATE].bytes,
            calls=1,
            when=When.STEP,
        )


def _context(job: Workload, degrees: MeshDegrees, share: RankShare) -> Iterator[Transfer]:
    calls = share.forwards * share.blocks
    blocks, place = share.ring_blocks(degrees), share.place
    # Of one token inside self-attention: its heads after tp, and after Ulysses as well.
    token_bytes = (
        share.micro_batch * (job.shape.num_heads // degrees.tp) * HEAD_DIM * job.item_bytes
    )
    held_bytes = token_bytes // degrees.ulysses

    def exchange(what: str, size: int) -> Transfer:
        return Transfer(
            what=what,
            op="all_to_all",
            axis="ulysses",
            ranks=degrees.ulysses,
            dtype=job.dtype,
            bytes=size,
            calls=calls,
            when=When.STEP,
        )

    yield exchange("q, k and v: tokens to heads", 3 * share.shards.cp.size * token_bytes)
    yield exchange("attention's output: heads to tokens", blocks[place["ring"]] * held_bytes)
    for hop in range(degrees.ring - 1):
        owner = (place["ring"] - hop) % degrees.ring
        yield Transfer(
            what="keys and values round the ring",
            op="send",
            axis="ring",
            ranks=degrees.ring,
            dtype=job.dtype,
            bytes=2 * blocks[owner] * held_bytes,
            calls=calls,
            when=When.STEP,
        )


def _tensor(job: Workload, degrees: MeshDegrees, share: RankShare) -> Iterator[Transfer]:
    calls = share.forwards * share.blocks
    tokens = share.micro_batch * share.shards.cp.size

    def collective(what: str, op: str, dtype: str, size: int, per_block: int) -> Transfer:
        return Transfer(
            what=what,
            op=op,
            axis="tp",
            ranks=degrees.tp,
            dtype=dtype,
            bytes=size,
            calls=per_block * calls,
            when=When.STEP,
        )

    yield collective(
        "sums of self-attention norms", "all_reduce", STATE, 2 * tokens * BY_NAME[STATE].bytes, 1
    )
    yield collective(
        "sums of cross-attention norms", "all_reduce", STATE, tokens * BY_NAME[STATE].bytes, 1
    )
    row_bytes = job.shape.dim * job.item_bytes
    if not degrees.sp:
        yield collective("row-parallel sums", "all_reduce", job.dtype, tokens * row_bytes, 3)
        return
    # The longest shard sets the length of all.
    shard = share.micro_batch * max(share.shards.sp.sizes) * row_bytes
    yield collective("tokens before column layers", "all_gather", job.dtype, shard, 3)
    yield collective("row-parallel sums", "reduce_scatter", job.dtype, degrees.tp * shard, 3)


def _step_end(
    job: Workload, degrees: MeshDegrees, share: RankShare, counting: Counting
) -> Iterator[Transfer]:
    if counting is Counting.LITERATURE:
        yield from _gathers(job, degrees, share, dtype=job.dtype, when=When.STEP)
    if len(share.branches) == 2 or not job.guided:
        return
    whole = counting is Counting.LITERATURE
    dtype = job.dtype if whole else STATE
    tokens = share.samples.size * (job.grid.tokens if whole else share.shards.sp.size)
    yield Transfer(
        what="predictions of the guidance branches",
        op="all_gather",
        axis="cfg",
        ranks=degrees.cfg,
        dtype=dtype,
        bytes=tokens * job.shape.token_dim * BY_NAME[dtype].bytes,
        calls=1,
        when=When.STEP,
    )


def _job_end(
    job: Workload, degrees: MeshDegrees, share: RankShare, counting: Counting
) -> Iterator[Transfer]:
    if counting is Counting.RUN:
        yield from _gathers(job, degrees, share, dtype=STATE, when=When.JOB)
    yield Transfer(
        what="finished videos",
        op="all_gather",
        axis="dp",
        ranks=degrees.dp,
        dtype=STATE,
        bytes=max(share.samples.sizes)
        * job.grid.tokens
        * job.shape.token_dim
        * BY_NAME[STATE].bytes,
        calls=1,
        when=When.JOB,
    )


def _gathers(
    job: Workload, degrees: MeshDegrees, share: RankShare, *, dtype: str, when: When
) -> Iterator[Transfer]:
    """All tokens on every rank, at the width of a latent's token."""
    item = share.samples.size * job.shape.token_dim * BY_NAME[dtype].bytes
    axis = (
        "cp"
        if min(degrees.ring, degrees.ulysses) > 1
        else "ring"
        if degrees.ring > 1
        else "ulysses"
    )
    for axis_name, ranks, sizes in (
        ("tp", degrees.tp if degrees.sp else 1, share.shards.sp.sizes),
        (axis, degrees.cp, share.shards.cp.sizes),
    ):
        yield Transfer(
            what="token shards of the latent",
            op="all_gather",
            axis=axis_name,
            ranks=ranks,
            dtype=dtype,
            bytes=max(sizes) * item,
            calls=1,
            when=when,
        )
