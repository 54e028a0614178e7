"""Bytes that one rank needs, before anything is loaded: weights exactly, what a job adds by the layers' largest moment.

Not covered: the VAE, which each rank holds, and what the allocator loses between tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from .degrees import MeshDegrees
from .dtypes import BY_NAME, Packing
from .parameters import BLOCK, OUTER, Parameter, split_name, stage_blocks
from .shape import HEAD_DIM, PATCH_POSITIONS, WanShape
from .workload import RankShare, Workload, rank_share

WORKING_BYTES = 512 * 2**20
"""Kept free beside the weights for buffers and libraries."""


STATE_TENSORS = 12
"""Float32 token shards of a latent that the loop holds: x, predictions, guidance, kept frames, the solver's history."""

UNPACKING_BYTES = 8
"""For each value of a packed weight in use: float32 on its way to its dtype, and the bytes that it comes from."""

WHOLE_WHEN_PACKED = {"time_projection.1.weight"}
"""Outside of the blocks the one matrix that is larger than a block's share may be."""

BlockPacking = tuple[Packing | None, ...]
"""How each of a block's parameters is packed; None for one that is not."""


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


def rank_memory(job: Workload, degrees: MeshDegrees, rank: int) -> RankMemory:
    """What rank `rank` of the job's mesh holds at its largest moment."""
    share = rank_share(job, degrees, rank)
    dim, tokens = job.shape.dim, share.shards
    text_rows = job.kept_texts * share.text_batch * sum(share.branches) * share.blocks
    latent = share.samples.size * job.shape.token_dim * BY_NAME["float32"].bytes
    rope = tokens.cp.size * HEAD_DIM // 2 * 8  # complex64
    images = tokens.sp.size * image_bytes(share)
    return RankMemory(
        weights=weight_bytes(job.shape, degrees, stage=share.place["pp"], dtype=job.dtype),
        text=2 * text_rows * (dim // degrees.tp) * job.item_bytes,
        state=STATE_TENSORS * tokens.sp.size * latent + images + rope,
        activations=activation_bytes(share),
        gathered=gathered_bytes(job.shape, degrees, dtype=job.dtype),
        unpacked=unpacked_bytes(job.shape, degrees),
    )


def image_bytes(share: RankShare) -> int:
    """Bytes of one token's image conditioning: of each branch, and of latent and image side by side."""
    shape = share.job.shape
    if not shape.image_dim:
        return 0
    channels = len(share.branches) * (shape.image_dim + shape.in_dim)
    return share.samples.size * channels * PATCH_POSITIONS * BY_NAME["float32"].bytes


def weight_bytes(shape: WanShape, degrees: MeshDegrees, *, stage: int, dtype: str) -> int:
    """Bytes that a rank of stage `stage` holds of the weights.

    Where tp ranks' shares of a packed weight begin or end inside a block, it is the most that any of them holds.
    """
    packed = dict(shape.packed)
    total = sum(
        parameter_bytes(
            each, shape, tp=degrees.tp, parts=1, dtype=dtype, packing=packed.get(each.name)
        )
        for each in OUTER
        if each.stage.includes(stage, stages=degrees.pp)
    )
    parts = degrees.replicas if degrees.fsdp else 1
    for packing, count in block_packings(shape, stages=degrees.pp, stage=stage):
        each = block_bytes(shape, tp=degrees.tp, parts=parts, dtype=dtype, packing=packing)
        total += count * each
    return total


def load_bytes(shape: WanShape, degrees: MeshDegrees, *, stage: int, dtype: str) -> int:
    """What a rank of stage `stage` must have free to load its weights and begin."""
    weights = weight_bytes(shape, degrees, stage=stage, dtype=dtype)
    moment = gathered_bytes(shape, degrees, dtype=dtype) + unpacked_bytes(shape, degrees)
    return weights + moment + WORKING_BYTES


def block_packings(
    shape: WanShape, *, stages: int = 1, stage: int = 0
) -> tuple[tuple[BlockPacking, int], ...]:
    """The different packings of a stage's blocks, and how many blocks have each."""
    blocks = stage_blocks(shape.num_layers, stages=stages, stage=stage)
    forms: list[list[Packing | None]] = [[None] * len(BLOCK) for _ in range(shape.num_layers)]
    places = {each.name: place for place, each in enumerate(BLOCK)}
    for name, packing in shape.packed:
        index, own = split_name(name)
        if index is not None:
            forms[index][places[own]] = packing
    return tuple(Counter(map(tuple, forms[blocks.start : blocks.stop])).items())


def block_bytes(
    shape: WanShape, *, tp: int, parts: int, dtype: str, packing: BlockPacking | None = None
) -> int:
    """Bytes that a tp rank has of one block's weights, or of one of the `parts` that fsdp cuts them into."""
    return sum(
        parameter_bytes(each, shape, tp=tp, parts=parts, dtype=dtype, packing=packed)
        for each, packed in zip(BLOCK, packing or (None,) * len(BLOCK), strict=True)
    )


def parameter_bytes(
    parameter: Parameter,
    shape: WanShape,
    *,
    tp: int,
    parts: int,
    dtype: str,
    packing: Packing | None,
) -> int:
    """Bytes that a tp rank has of one parameter, or of one of the `parts` that fsdp cuts its share into.

    fsdp cuts rows of dim 0, each parameter by itself, and pads where they do not divide.
    """
    rows, *inner = parameter.shape(shape)
    columns, columns_cut = prod(inner), tp if parameter.cut_dim == 1 else 1
    if parameter.cut_dim == 0:
        rows //= tp
    if packing is None:
        item = BY_NAME["float32" if parameter.is_float32 else dtype].bytes
        row_bytes = columns // columns_cut * item
    else:
        row_bytes = packing.most_bytes(columns, parts=columns_cut)
    return -(-rows // parts) * row_bytes


def unpacked_bytes(shape: WanShape, degrees: MeshDegrees) -> int:
    """Bytes for the largest packed weight while its linear runs: its values, and what unpacking makes on the way.

    A block's largest matrix stands for all that may be packed there; of the rest the time projection counts.
    """
    packed = {name for name, _ in shape.packed}
    if not packed:
        return 0
    # Along whichever dim it is cut, a rank's part is as large.
    sizes = [prod(each.shape(shape)) // degrees.tp for each in BLOCK if each.cut_dim is not None]
    sizes += [prod(each.shape(shape)) for each in OUTER if each.name in packed & WHOLE_WHEN_PACKED]
    return UNPACKING_BYTES * max(sizes)


def gathered_bytes(shape: WanShape, degrees: MeshDegrees, *, dtype: str) -> int:
    """Bytes of the whole blocks that fsdp holds for a moment: the one that runs, the next one, and its buffer."""
    if not degrees.fsdp:
        return 0
    sizes = [
        block_bytes(shape, tp=degrees.tp, parts=1, dtype=dtype, packing=packing)
        for packing, _ in block_packings(shape)
    ]
    return 3 * max(sizes)


def activation_bytes(share: RankShare) -> int:
    """The largest live set inside a block, out of the moments that can be the largest.

    In units of a token shard at the model's width: `between` the pairs of cut layers (1/tp of it with sp), `whole`
    inside them, `cut` with this rank's heads.
    """
    job, degrees = share.job, share.degrees
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
