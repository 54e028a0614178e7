"""Bytes that one rank needs, before anything is loaded: weights exactly, what a job adds by the layers' largest moment.

Not covered: the VAE, which each rank holds, and what the allocator loses between tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .degrees import MeshDegrees
from .packing import Packing
from .pipeline import stage_blocks
from .shape import HEAD_DIM, PATCH_POSITIONS, PATCH_SIZE, WanShape
from .workload import DTYPE_BYTES, PlannedJob, RankShare, rank_share

WORKING_BYTES = 512 * 2**20
"""Kept free beside the weights for buffers and libraries."""


STATE_TENSORS = 12
"""Float32 token shards of a latent that the loop holds: x, predictions, guidance, kept frames, the solver's history."""

UNPACKING_BYTES = 8
"""For each value of a packed weight in use: float32 on its way to its dtype, and the bytes that it comes from."""

_MATRICES = (
    *(
        (f"{attention}.{name}", name == "o")
        for attention in ("self_attn", "cross_attn")
        for name in "qkvo"
    ),
    ("ffn.0", False),
    ("ffn.2", True),
)
"""A block's matrices, and whether tp cuts their columns (RowParallelLinear) or their rows."""

BlockPacking = tuple[Packing | None, ...]
"""Of each of a block's matrices; None for one that is not packed."""
_UNPACKED: BlockPacking = (None,) * len(_MATRICES)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of one rank during a job. text: keys and values. state: latents and tables. working: libraries, buffers.

    gathered: whole blocks that fsdp holds for as long as they run. unpacked: a quantised weight while its linear runs.
    """

    weights: int
    text: int
    state: int
    activations: int
    gathered: int = 0
    unpacked: int = 0
    working: int = WORKING_BYTES

    @property
    def total(self) -> int:
        held = self.weights + self.gathered + self.unpacked
        return held + self.text + self.state + self.activations + self.working


def rank_memory(job: PlannedJob, degrees: MeshDegrees, rank: int) -> RankMemory:
    """What rank `rank` of the job's mesh holds at its largest moment."""
    share = rank_share(job, degrees, rank)
    dim, tokens = job.shape.dim, share.shards
    text_rows = share.text_batch * sum(share.branches) * share.blocks
    latent = share.samples.size * job.shape.token_dim * DTYPE_BYTES["float32"]
    rope = tokens.cp.size * HEAD_DIM // 2 * 8  # complex64
    images = tokens.sp.size * image_bytes(job, share)
    return RankMemory(
        weights=weight_bytes(job.shape, degrees, stage=share.place["pp"], dtype=job.dtype),
        text=2 * text_rows * (dim // degrees.tp) * job.item_bytes,
        state=STATE_TENSORS * tokens.sp.size * latent + images + rope,
        activations=activation_bytes(job, degrees, share),
        gathered=gathered_bytes(job.shape, degrees, dtype=job.dtype),
        unpacked=unpacked_bytes(job.shape, degrees),
    )


def image_bytes(job: PlannedJob, share: RankShare) -> int:
    """Of one token in models with image conditioning: that of each branch, and latent and image side by side."""
    if not job.shape.image_dim:
        return 0
    branches = len(share.branches)
    channels = branches * job.shape.image_dim + branches * job.shape.in_dim
    return share.samples.size * channels * PATCH_POSITIONS * DTYPE_BYTES["float32"]


def weight_bytes(shape: WanShape, degrees: MeshDegrees, *, stage: int, dtype: str) -> int:
    """Of the weights of a rank of stage `stage`. Norms, modulation and the time embedding stay float32.

    Of a tp rank whose share of a packed weight begins or ends inside a block, the most that any of them holds.
    """
    d, item, wide = shape.dim, DTYPE_BYTES[dtype], DTYPE_BYTES["float32"]
    packed = dict(shape.packed)

    def matrix(name: str, rows: int, columns: int, item: int) -> int:
        return rows * _row_bytes(packed.get(f"{name}.weight"), columns, 1, item)

    total = matrix("text_embedding.0", d, shape.text_dim, item) + d * item
    total += matrix("text_embedding.2", d, d, item) + d * item
    total += matrix("time_embedding.0", d, shape.freq_dim, wide) + d * wide
    total += matrix("time_embedding.2", d, d, wide) + d * wide
    total += matrix("time_projection.1", 6 * d, d, wide) + 6 * d * wide
    if stage == 0:
        pt, ph, pw = PATCH_SIZE
        total += (d * shape.in_dim * pt * ph * pw + d) * item
    if stage == degrees.pp - 1:
        total += matrix("head.head", shape.token_dim, d, item) + shape.token_dim * item
        total += 2 * d * wide
    parts = degrees.replicas if degrees.fsdp else 1
    for packing, count in block_packings(shape, stages=degrees.pp, stage=stage):
        each = block_bytes(shape, tp=degrees.tp, parts=parts, dtype=dtype, packing=packing)
        total += count * each
    return total


def block_packings(
    shape: WanShape, *, stages: int = 1, stage: int = 0
) -> tuple[tuple[BlockPacking, int], ...]:
    """The different packings of a stage's blocks, and how many blocks have each."""
    packed = dict(shape.packed)
    blocks = stage_blocks(shape.num_layers, stages=stages, stage=stage)
    found = Counter(
        tuple(packed.get(f"blocks.{index}.{name}.weight") for name, _ in _MATRICES)
        for index in range(blocks.start, blocks.stop)
    )
    return tuple(found.items())


def load_bytes(shape: WanShape, degrees: MeshDegrees, *, stage: int, dtype: str) -> int:
    """What a rank of stage `stage` must have free to load its weights and begin."""
    weights = weight_bytes(shape, degrees, stage=stage, dtype=dtype)
    moment = gathered_bytes(shape, degrees, dtype=dtype) + unpacked_bytes(shape, degrees)
    return weights + moment + WORKING_BYTES


def block_bytes(
    shape: WanShape, *, tp: int, parts: int, dtype: str, packing: BlockPacking | None = None
) -> int:
    """Of a tp rank's weights of one block, or of one of the `parts` that fsdp cuts them into.

    Rows of dim 0 are cut, each parameter by itself, and padded where they do not divide.
    """
    d, item = shape.dim, DTYPE_BYTES[dtype]

    def size(rows: int, row_bytes: int) -> int:
        return -(-rows // parts) * row_bytes

    total = 0
    for (name, is_cut_by_row), packed in zip(_MATRICES, packing or _UNPACKED, strict=True):
        rows, columns = _matrix_shape(shape, name)
        if not is_cut_by_row:
            rows //= tp
        total += size(rows, _row_bytes(packed, columns, tp if is_cut_by_row else 1, item))
        total += size(rows, item)  # its bias
    floats = 4 * size(d // tp, 1) + 2 * size(d, 1) + size(1, 6 * d)
    return total + floats * DTYPE_BYTES["float32"]


def unpacked_bytes(shape: WanShape, degrees: MeshDegrees) -> int:
    """Of the largest packed weight while its linear runs: its values, and what unpacking makes on the way."""
    names = {name for name, _ in shape.packed}
    if not names:
        return 0
    largest = max(shape.ffn_dim, shape.dim) * shape.dim // degrees.tp
    if "time_projection.1.weight" in names:
        largest = max(largest, 6 * shape.dim**2)
    return UNPACKING_BYTES * largest


def _matrix_shape(shape: WanShape, name: str) -> tuple[int, int]:
    """Full rows and columns of a block's matrix."""
    return (
        shape.ffn_dim if name == "ffn.0" else shape.dim,
        shape.ffn_dim if name == "ffn.2" else shape.dim,
    )


def _row_bytes(packed: Packing | None, columns: int, parts: int, item_bytes: int) -> int:
    """Of a rank's part of a row whose columns are cut into `parts`."""
    if packed is None:
        return columns // parts * item_bytes
    return packed.most_bytes(columns, parts=parts)


def gathered_bytes(shape: WanShape, degrees: MeshDegrees, *, dtype: str) -> int:
    """Of the whole blocks that a rank holds for a moment with fsdp: the one that runs, the next one, its buffer."""
    if not degrees.fsdp:
        return 0
    sizes = [
        block_bytes(shape, tp=degrees.tp, parts=1, dtype=dtype, packing=packing)
        for packing, _ in block_packings(shape)
    ]
    return 3 * max(sizes)


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
