"""Every parameter of a Wan transformer, written once: its name and shape, how tp cuts it, which stage holds it.

The file check, the loader, the module swap of tensor parallelism and the memory formulas read it; workers/model/wan.py
says what the parameters are for. Names and shapes are those of the official checkpoints.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial

from .shape import PATCH_SIZE, WanShape
from .shards import ShardRange, shard_range

Size = int | str
"""A number, or the name of one of WanShape's."""


class Stage(enum.Enum):
    """Which pipeline stages hold a parameter."""

    FIRST = "first"
    LAST = "last"
    EVERY = "every"

    def includes(self, stage: int, *, stages: int) -> bool:
        return self is Stage.EVERY or stage == (0 if self is Stage.FIRST else stages - 1)


class Cut(enum.Enum):
    """How tp cuts a linear. Without one, every rank has all of it."""

    COLUMN = "column"
    """By output features: dim 0 of weight and bias. Its input is replicated, its output sharded."""
    ROW = "row"
    """By input features: dim 1 of the weight. Its partial outputs are summed; the bias counts once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Part start..stop-1 of `dim` of a full tensor."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One line's tensor. name: of a block's what follows `blocks.N.`.

    cut_dim: which dim tp cuts; None if every rank has all of it. is_float32: float32 whatever the weights' dtype is.
    """

    name: str
    sizes: tuple[Size, ...]
    cut_dim: int | None = None
    is_float32: bool = False
    stage: Stage = Stage.EVERY

    def shape(self, model: WanShape) -> tuple[int, ...]:
        """The whole parameter's."""
        return tuple(size if isinstance(size, int) else getattr(model, size) for size in self.sizes)


def linear(
    name: str,
    out: Size,
    columns: Size,
    *more: int,
    cut: Cut | None = None,
    is_float32: bool = False,
    stage: Stage = Stage.EVERY,
) -> tuple[Parameter, ...]:
    """Weight [out, columns, *more] and bias [out]."""
    line = partial(Parameter, is_float32=is_float32, stage=stage)
    column_cut = 0 if cut is Cut.COLUMN else None
    weight_cut = 1 if cut is Cut.ROW else column_cut
    return (
        line(name=f"{name}.weight", sizes=(out, columns, *more), cut_dim=weight_cut),
        line(name=f"{name}.bias", sizes=(out,), cut_dim=column_cut),
    )


def float32(
    name: str, *sizes: Size, cut_dim: int | None = None, stage: Stage = Stage.EVERY
) -> tuple[Parameter, ...]:
    """One that stays float32: of a norm, or a modulation."""
    return (Parameter(name=name, sizes=sizes, cut_dim=cut_dim, is_float32=True, stage=stage),)


OUTER = (
    *linear("patch_embedding", "dim", "in_dim", *PATCH_SIZE, stage=Stage.FIRST),
    *linear("text_embedding.0", "dim", "text_dim"),
    *linear("text_embedding.2", "dim", "dim"),
    *linear("time_embedding.0", "dim", "freq_dim", is_float32=True),
    *linear("time_embedding.2", "dim", "dim", is_float32=True),
    *linear("time_projection.1", "modulation_dim", "dim", is_float32=True),
    *float32("head.modulation", 1, 2, "dim", stage=Stage.LAST),
    *linear("head.head", "token_dim", "dim", stage=Stage.LAST),
)
"""Outside of the blocks."""

# A norm over sharded features is cut like them; its statistic is reduced over the ranks.
BLOCK = (
    *float32("modulation", 1, 6, "dim"),
    *linear("self_attn.q", "dim", "dim", cut=Cut.COLUMN),
    *linear("self_attn.k", "dim", "dim", cut=Cut.COLUMN),
    *linear("self_attn.v", "dim", "dim", cut=Cut.COLUMN),
    *linear("self_attn.o", "dim", "dim", cut=Cut.ROW),
    *float32("self_attn.norm_q.weight", "dim", cut_dim=0),
    *float32("self_attn.norm_k.weight", "dim", cut_dim=0),
    *linear("cross_attn.q", "dim", "dim", cut=Cut.COLUMN),
    *linear("cross_attn.k", "dim", "dim", cut=Cut.COLUMN),
    *linear("cross_attn.v", "dim", "dim", cut=Cut.COLUMN),
    *linear("cross_attn.o", "dim", "dim", cut=Cut.ROW),
    *float32("cross_attn.norm_q.weight", "dim", cut_dim=0),
    *float32("cross_attn.norm_k.weight", "dim", cut_dim=0),
    *float32("norm3.weight", "dim"),
    *float32("norm3.bias", "dim"),
    *linear("ffn.0", "ffn_dim", "dim", cut=Cut.COLUMN),
    *linear("ffn.2", "dim", "ffn_dim", cut=Cut.ROW),
)
"""In each block."""


def split_name(name: str) -> tuple[int | None, str]:
    """A parameter's full name as its block, None outside of them, and its name in the table."""
    first, _, rest = name.partition(".")
    index, _, own = rest.partition(".")
    return (int(index), own) if first == "blocks" and index.isdecimal() else (None, name)


def parameter_of(name: str) -> Parameter:
    """The line of a parameter's full name. Raises KeyError for a name that the table does not know."""
    block, own = split_name(name)
    for parameter in OUTER if block is None else BLOCK:
        if parameter.name == own:
            return parameter
    raise KeyError(f"{name!r} is no parameter of the table")


def expected_parameters(shape: WanShape) -> dict[str, tuple[int, ...]]:
    """Full name and shape of every parameter, in the order of a forward."""
    first = [each for each in OUTER if each.stage is not Stage.LAST]
    last = [each for each in OUTER if each.stage is Stage.LAST]
    return {
        **{each.name: each.shape(shape) for each in first},
        **{
            f"blocks.{index}.{each.name}": each.shape(shape)
            for index in range(shape.num_layers)
            for each in BLOCK
        },
        **{each.name: each.shape(shape) for each in last},
    }


def parameter_slice(
    name: str, shape: tuple[int, ...], *, tp_rank: int, tp_size: int
) -> Slice | None:
    """Which part of the full parameter `name` a tensor-parallel rank holds; None for all of it."""
    dim = None if tp_size == 1 else parameter_of(name).cut_dim
    if dim is None:
        return None
    if shape[dim] % tp_size:
        raise ValueError(
            f"{name} has {shape[dim]} along dim {dim}, which tp{tp_size} does not divide"
        )
    part = shape[dim] // tp_size
    return Slice(dim=dim, start=tp_rank * part, stop=(tp_rank + 1) * part)


def stage_blocks(num_layers: int, *, stages: int, stage: int) -> ShardRange:
    """The contiguous blocks of a stage; earlier stages hold one more where it does not divide."""
    return shard_range(num_layers, parts=stages, rank=stage)
