"""Bytes that one rank needs, before anything is loaded: weights exactly, what a job adds by the layers' largest moment.

Not covered: the VAE, which each rank holds, and what the allocator loses between tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from .degrees import MeshDegrees
from .job import DTYPE_BYTES, PlannedJob, RankShare, rank_share
from .pipeline import stage_blocks
from .shape import HEAD_DIM, PATCH_SIZE, WanShape

WORKING_BYTES = 512 * 2**20
"""Kept free beside the weights for buffers and libraries."""


STATE_TENSORS = 12
"""Float32 token shards of a latent that the loop holds: x, predictions, guidance, kept frames, the solver's history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of one rank during a job. text: keys and values. state: latents and tables. working: libraries, buffers.

    gathered: whole blocks that fsdp holds for as long as they run.
    """

    weights: int
    text: int
    state: int
    activations: int
    gathered: int = 0
    working: int = WORKING_BYTES

    @property
    def total(self) -> int:
        held = self.weights + self.gathered
        return held + self.text + self.state + self.activations + self.working


def rank_memory(job: PlannedJob, degrees: MeshDegrees, rank: int) -> RankMemory:
    """What rank `rank` of the job's mesh holds at its largest moment."""
    share = rank_share(job, degrees, rank)
    dim, tokens = job.shape.dim, share.shards
    text_rows = share.text_batch * sum(share.branches) * share.blocks
    latent = share.samples.size * job.shape.token_dim * DTYPE_BYTES["float32"]
    rope = tokens.cp.size * HEAD_DIM // 2 * 8  # complex64
    return RankMemory(
        weights=weight_bytes(job.shape, degrees, stage=share.place["pp"], dtype=job.dtype),
        text=2 * text_rows * (dim // degrees.tp) * job.item_bytes,
        state=STATE_TENSORS * tokens.sp.size * latent + rope,
        activations=activation_bytes(job, degrees, share),
        gathered=gathered_bytes(job.shape, degrees, dtype=job.dtype),
    )


def weight_bytes(shape: WanShape, degrees: MeshDegrees, *, stage: int, dtype: str) -> int:
    """Of the weights of a rank of stage `stage`. Norms, modulation and the time embedding stay float32."""
    d = shape.dim
    blocks = stage_blocks(shape.num_layers, stages=degrees.pp, stage=stage).size
    typed = d * shape.text_dim + d + d * d + d
    floats = d * shape.freq_dim + d + d * d + d + 6 * d * d + 6 * d
    if stage == 0:
        pt, ph, pw = PATCH_SIZE
        typed += d * shape.in_dim * pt * ph * pw + d
    if stage == degrees.pp - 1:
        typed += shape.token_dim * d + shape.token_dim
        floats += 2 * d
    ends = typed * DTYPE_BYTES[dtype] + floats * DTYPE_BYTES["float32"]
    parts = degrees.replicas if degrees.fsdp else 1
    return blocks * block_bytes(shape, tp=degrees.tp, parts=parts, dtype=dtype) + ends


def load_bytes(shape: WanShape, degrees: MeshDegrees, *, stage: int, dtype: str) -> int:
    """What a rank of stage `stage` must have free to load its weights and begin."""
    weights = weight_bytes(shape, degrees, stage=stage, dtype=dtype)
    return weights + gathered_bytes(shape, degrees, dtype=dtype) + WORKING_BYTES


def block_bytes(shape: WanShape, *, tp: int, parts: int, dtype: str) -> int:
    """Of a tp rank's weights of one block, or of one of the `parts` that fsdp cuts them into.

    Rows of dim 0 are cut, each parameter by itself, and padded where they do not divide.
    """
    d, f, cut = shape.dim, shape.ffn_dim // tp, shape.dim // tp
    column, row = [(cut, d), (cut, 1)], [(d, cut), (d, 1)]
    typed = 2 * (3 * column + row) + [(f, d), (f, 1), (d, f), (d, 1)]
    floats = 4 * [(cut, 1)] + 2 * [(d, 1)] + [(1, 6 * d)]

    def items(parameters: list[tuple[int, int]]) -> int:
        return sum(-(-rows // parts) * width for rows, width in parameters)

    return items(typed) * DTYPE_BYTES[dtype] + items(floats) * DTYPE_BYTES["float32"]


def gathered_bytes(shape: WanShape, degrees: MeshDegrees, *, dtype: str) -> int:
    """Of the whole blocks that a rank holds for a moment with fsdp: the one that runs, the next one, its buffer."""
    return 3 * block_bytes(shape, tp=degrees.tp, parts=1, dtype=dtype) if degrees.fsdp else 0


def activation_bytes(job: PlannedJob, degrees: MeshDegrees, share: RankShare) -> int:
    """The largest live set inside a block, out of the moments that can be the largest.

    In units of a token shard at the model's width: `between` the pairs of cut layers (1/tp of it with sp), `whole`
    inside them, `cut` with this rank's heads.
    """
    item = job.item_bytes
    wide = 4  # float32 copies for norms and gates
    tokens = share.micro_batch * share.shards.cp.size
    between = share.micro_batch * share.shards.sp.size * job.shape.dim
    whole = tokens * job.shape.dim
    cut = whole // degrees.tp
    hidden = tokens * job.shape.ffn_dim // degrees.tp

    # The block's input, which its caller holds too, and a norm's output; after the first update the input is one more.
    held = 2 * between * item + (whole * item if degrees.sp else 0)
    held_later = held + between * item
    copies = wide if item < wide else 0  # what `.float()` makes
    inner = 9 if degrees.ulysses > 1 else 3  # q, k and v; packed and received as well
    summed = whole * item + (between * item if degrees.sp else 0)
    # The merge of a ring: what arrived, what arrives meanwhile, a part and its copy, the sum before and after.
    pairs = 2 if degrees.ring == 2 else 4
    merge = (inner + pairs + 1) * cut * item + (2 * wide + copies) * cut
    moments = (
        held + (3 * item + copies + (item if copies else 0)) * cut,  # a query's norm
        held + (inner + (3 if degrees.ulysses > 1 else 1)) * cut * item,  # attention
        held + (merge if degrees.ring > 1 else 0),
        held + 4 * cut * item + summed,  # its output layer
        held_later + 2 * hidden * item,  # GELU
        held_later + hidden * item + summed,
        (3 * item + copies + wide) * between,  # a gate
    )
    return max(moments)
