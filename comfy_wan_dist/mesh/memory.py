"""Bytes that one rank needs, before anything is loaded: weights exactly, what a job adds by the layers' largest moment.

Not covered: the VAE, which each rank holds, and what the allocator loses between tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from ..ipc.dtypes import DTYPE_BYTES
from .degrees import MeshDegrees
from .packing import Packing
from .parameters import BLOCK, OUTSIDE, Parameter, Stage, find_parameter
from .pipeline import stage_blocks
from .shape import HEAD_DIM, PATCH_POSITIONS, WanShape
from .workload import PlannedJob, RankShare, rank_share

WORKING_BYTES = 512 * 2**20
"""Kept free beside the weights for buffers and libraries."""


STATE_TENSORS = 12
"""Float32 token shards of a latent that the loop holds: x, predictions, guidance, kept frames, the solver's history."""

UNPACKING_BYTES = 8
"""For each value of a packed weight in use: float32 on its way to its dtype, and the bytes that it comes from."""

BlockPacking = tuple[Packing | None, ...]
"""Of each of a block's parameters, in the table's order; None for one that is not packed."""


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
    """The weights of a rank of stage `stage`.

    Of a tp rank whose share of a packed weight begins or ends inside a block, the most that any of them holds.
    """
    packed = dict(shape.packed)
    stages = {Stage.ALL, *([Stage.FIRST] if stage == 0 else [])}
    stages |= {Stage.LAST} if stage == degrees.pp - 1 else set()
    total = sum(
        part_bytes(each, shape, tp=1, parts=1, dtype=dtype, packing=packed.get(each.name))
        for each in OUTSIDE
        if each.stage in stages
    )
    parts = degrees.replicas if degrees.fsdp else 1
    for packing, count in block_packings(shape, stages=degrees.pp, stage=stage):
        each_block = block_bytes(shape, tp=degrees.tp, parts=parts, dtype=dtype, packing=packing)
        total += count * each_block
    return total


def part_bytes(
    parameter: Parameter,
    shape: WanShape,
    *,
    tp: int,
    parts: int,
    dtype: str,
    packing: Packing | None,
) -> int:
    """A tp rank's share of a parameter, or one of the `parts` that fsdp cuts it into.

    fsdp cuts rows of dim 0, padded where they do not divide.
    """
    rows, columns = parameter.dims(shape)[0], prod(parameter.dims(shape)[1:])
    if parameter.cut_dim == 0:
        rows //= tp
    column_parts = tp if parameter.cut_dim == 1 else 1
    if packing is None:
        item = DTYPE_BYTES["float32" if parameter.is_float32 else dtype]
        row_bytes = columns // column_parts * item
    else:
        row_bytes = packing.most_bytes(columns, parts=column_parts)
    return -(-rows // parts) * row_bytes


def block_packings(
    shape: WanShape, *, stages: int = 1, stage: int = 0
) -> tuple[tuple[BlockPacking, int], ...]:
    """The different packings of a stage's blocks, and how many blocks have each."""
    packed = dict(shape.packed)
    blocks = stage_blocks(shape.num_layers, stages=stages, stage=stage)
    found = Counter(
        tuple(packed.get(f"blocks.{index}.{each.name}") for each in BLOCK)
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
    """A tp rank's weights of one block, or one of the `parts` that fsdp cuts each of them into."""
    return sum(
        part_bytes(each, shape, tp=tp, parts=parts, dtype=dtype, packing=packed)
        for each, packed in zip(BLOCK, packing or (None,) * len(BLOCK), strict=True)
    )


def unpacked_bytes(shape: WanShape, degrees: MeshDegrees) -> int:
    """The largest packed weight while its linear runs: its values, and what unpacking makes on the way."""
    lines = [find_parameter(name) for name, _ in shape.packed]
    sizes = [
        prod(line.dims(shape)) // (1 if line.cut_dim is None else degrees.tp) for line in lines
    ]
    return UNPACKING_BYTES * max(sizes, default=0)


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
