"""The parameters of a Wan transformer: names, shapes, how tensor parallelism cuts them, which stay float32.

One table, which everything that speaks of parameters reads: the file check, the module swap, the loader, and the
formulas of memory. The names are those of the official checkpoints.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

from .shape import PATCH_SIZE, WanShape

Dims = Callable[[WanShape], tuple[int, ...]]


class Cut(enum.Enum):
    """How a module's parameters are cut over the tensor-parallel ranks."""

    COLUMN = "column"
    """A linear cut by output features: weight dim 0, bias dim 0. Its input is replicated, its output sharded."""
    ROW = "row"
    """A linear cut by input features: weight dim 1. Its partial outputs are summed; the bias counts once."""
    SHARDED_NORM = "sharded_norm"
    """A norm over sharded features: weight dim 0; its statistic is reduced over the ranks."""
    REPLICATED = "replicated"


class Stage(enum.Enum):
    """Which pipeline stages hold a parameter outside the blocks."""

    ALL = "all"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A line of the table. name: within its block, or in the model. is_float32: whatever the weights' dtype is."""

    name: str
    dims: Dims
    cut: Cut = Cut.REPLICATED
    is_float32: bool = False
    stage: Stage = Stage.ALL

    @property
    def cut_dim(self) -> int | None:
        """The dim that tp cuts."""
        if self.cut is Cut.REPLICATED or (self.cut is Cut.ROW and self.name.endswith(".bias")):
            return None
        return 1 if self.cut is Cut.ROW else 0


def _linear(
    name: str,
    dims: Dims,
    cut: Cut = Cut.REPLICATED,
    *,
    is_float32: bool = False,
    stage: Stage = Stage.ALL,
) -> tuple[Parameter, Parameter]:
    """dims: of the weight, outputs first; the bias has the first of them."""

    def parameter(leaf: str, dims: Dims) -> Parameter:
        name_of_it = f"{name}.{leaf}"
        return Parameter(name=name_of_it, dims=dims, cut=cut, is_float32=is_float32, stage=stage)

    return parameter("weight", dims), parameter("bias", lambda shape: dims(shape)[:1])


def _norm(name: str, cut: Cut) -> Parameter:
    return Parameter(name=f"{name}.weight", dims=lambda s: (s.dim,), cut=cut, is_float32=True)


def _attention(name: str) -> tuple[Parameter, ...]:
    projections = [
        parameter
        for each in "qkvo"
        for parameter in _linear(
            f"{name}.{each}", lambda s: (s.dim, s.dim), Cut.ROW if each == "o" else Cut.COLUMN
        )
    ]
    norms = [_norm(f"{name}.norm_{each}", Cut.SHARDED_NORM) for each in "qk"]
    return (*projections, *norms)


BLOCK: tuple[Parameter, ...] = (
    Parameter(name="modulation", dims=lambda s: (1, 6, s.dim), is_float32=True),
    *_attention("self_attn"),
    *_attention("cross_attn"),
    _norm("norm3", Cut.REPLICATED),
    Parameter(name="norm3.bias", dims=lambda s: (s.dim,), is_float32=True),
    *_linear("ffn.0", lambda s: (s.ffn_dim, s.dim), Cut.COLUMN),
    *_linear("ffn.2", lambda s: (s.dim, s.ffn_dim), Cut.ROW),
)
"""Each block's parameters."""

OUTSIDE: tuple[Parameter, ...] = (
    *_linear("patch_embedding", lambda s: (s.dim, s.in_dim, *PATCH_SIZE), stage=Stage.FIRST),
    *_linear("text_embedding.0", lambda s: (s.dim, s.text_dim)),
    *_linear("text_embedding.2", lambda s: (s.dim, s.dim)),
    *_linear("time_embedding.0", lambda s: (s.dim, s.freq_dim), is_float32=True),
    *_linear("time_embedding.2", lambda s: (s.dim, s.dim), is_float32=True),
    *_linear("time_projection.1", lambda s: (6 * s.dim, s.dim), is_float32=True),
    Parameter(
        name="head.modulation", dims=lambda s: (1, 2, s.dim), is_float32=True, stage=Stage.LAST
    ),
    *_linear("head.head", lambda s: (s.token_dim, s.dim), stage=Stage.LAST),
)
"""The other parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Part start..stop-1 of `dim` of a full tensor."""

    dim: int
    start: int
    stop: int


def expected_parameters(shape: WanShape) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model and its full shape, official names."""
    expected = {each.name: each.dims(shape) for each in OUTSIDE if each.stage is not Stage.LAST}
    for index in range(shape.num_layers):
        expected |= {f"blocks.{index}.{each.name}": each.dims(shape) for each in BLOCK}
    return expected | {each.name: each.dims(shape) for each in OUTSIDE if each.stage is Stage.LAST}


def find_parameter(name: str) -> Parameter:
    """The line of a parameter. Raises KeyError for a name that the table does not know."""
    in_block = re.fullmatch(r"blocks\.\d+\.(.+)", name)
    lines, known_as = (BLOCK, in_block[1]) if in_block else (OUTSIDE, name)
    for line in lines:
        if line.name == known_as:
            return line
    raise KeyError(f"{name!r} is no parameter of a Wan transformer")


def cut_of(module_name: str) -> Cut:
    """The cut of a module that has a weight. Raises KeyError for a name that the table does not know."""
    return find_parameter(f"{module_name}.weight").cut


def parameter_slice(
    name: str, shape: tuple[int, ...], *, tp_rank: int, tp_size: int
) -> Slice | None:
    """Which part of the full parameter `name` a tensor-parallel rank holds; None for all of it."""
    dim = find_parameter(name).cut_dim
    if tp_size == 1 or dim is None:
        return None
    if shape[dim] % tp_size:
        raise ValueError(
            f"{name} has {shape[dim]} along dim {dim}, which tp{tp_size} does not divide"
        )
    part = shape[dim] // tp_size
    return Slice(dim=dim, start=tp_rank * part, stop=(tp_rank + 1) * part)
