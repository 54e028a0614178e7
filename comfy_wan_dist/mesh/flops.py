"""Floating-point operations of one rank: matrix products and attention, a multiply and an add counting as two.

Not covered: norms, modulation, rotary embedding and the solver, which are under one per cent. The VAE's are a rough
number for all ranks, to put its jobs in order with others.
"""

from __future__ import annotations

from dataclasses import dataclass

from .degrees import MeshDegrees
from .workload import Counting, RankShare, Workload, rank_share

VAE_FLOPS_PER_PIXEL = 2e7
"""The decoder's at 121x704x1280, where it takes 2.0e15 in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFlops:
    """One forward of one micro-batch through one block."""

    projections: int
    """q, k, v and o of self-attention."""
    attention: int
    """Scores and values of self-attention."""
    cross: int
    ffn: int

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.cross + self.ffn


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFlops:
    """ends: embedding, head and time embedding, per step. text: its embedding, keys and values, once per job."""

    block: BlockFlops
    block_calls: int
    """Blocks times micro-batches, per step."""
    ends: int
    text: int

    @property
    def step(self) -> int:
        return self.block_calls * self.block.total + self.ends

    def job(self, steps: int) -> int:
        return steps * self.step + self.text


def rank_flops(
    job: Workload, degrees: MeshDegrees, rank: int, counting: Counting = Counting.RUN
) -> RankFlops:
    """What rank `rank` of the job's mesh computes."""
    share = rank_share(job, degrees, rank)
    text = _text_keys_values(share)
    per_step = counting is Counting.LITERATURE
    block_calls = share.blocks * share.forwards
    return RankFlops(
        block=_block(share, text // block_calls if per_step else 0),
        block_calls=block_calls,
        ends=_ends(share),
        text=_text_embedding(share) + (0 if per_step else text),
    )


def _block(share: RankShare, text: int) -> BlockFlops:
    job, degrees = share.job, share.degrees
    width = job.shape.dim // degrees.tp
    queries = share.micro_batch * share.shards.cp.size
    # Inside self-attention Ulysses turns fewer tokens into fewer heads of more tokens.
    inner_queries = share.micro_batch * share.ring_blocks[share.place["ring"]]
    # Branches may have texts of different length: their mean is exact over a step.
    text_tokens = sum(share.branches) / len(share.branches)
    return BlockFlops(
        projections=8 * queries * job.shape.dim * width,
        attention=4 * inner_queries * job.grid.tokens * (width // degrees.ulysses),
        cross=4 * queries * job.shape.dim * width + round(4 * queries * text_tokens * width) + text,
        ffn=4 * queries * job.shape.dim * (job.shape.ffn_dim // degrees.tp),
    )


def _text_embedding(share: RankShare) -> int:
    shape, tokens = share.job.shape, share.text_batch * sum(share.branches)
    return 2 * tokens * (shape.text_dim + shape.dim) * shape.dim


def _text_keys_values(share: RankShare) -> int:
    """Keys and values of cross-attention for all branches and blocks of the stage."""
    tokens = share.text_batch * sum(share.branches)
    dim = share.job.shape.dim
    return share.blocks * tokens * 4 * dim * (dim // share.degrees.tp)


def _ends(share: RankShare) -> int:
    shape = share.job.shape
    tokens = share.micro_batch * share.shards.sp.size
    patches = 2 * tokens * shape.in_dim * 4 * shape.dim if share.is_first_stage else 0
    head = 2 * tokens * shape.dim * shape.token_dim if share.is_last_stage else 0
    rows = share.micro_batch * share.job.timestep_rows
    time = 2 * rows * shape.dim * (shape.freq_dim + shape.dim + 6 * shape.dim)
    return share.forwards * (patches + head + time)


def vae_flops(*, frames: int, height: int, width: int) -> float:
    """The work of decoding so many pixels, on all ranks together; encoding is of the same order."""
    return VAE_FLOPS_PER_PIXEL * frames * height * width
