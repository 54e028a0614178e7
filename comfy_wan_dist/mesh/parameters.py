"""How every parameter is cut over the tensor-parallel ranks: one table with two readers.

`apply_tensor_parallel` shapes the modules by it, the checkpoint loader slices the file by it.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Cut(enum.Enum):
    """How a module's parameters are cut."""

    COLUMN = "column"
    """A linear cut by output features: weight dim 0, bias dim 0. Its input is replicated, its output sharded."""
    ROW = "row"
    """A linear cut by input features: weight dim 1. Its partial outputs are summed; the bias counts once."""
    SHARDED_NORM = "sharded_norm"
    """A norm over sharded features: weight dim 0; its statistic is reduced over the ranks."""
    REPLICATED = "replicated"


PLAN: tuple[tuple[str, Cut], ...] = (
    (r"blocks\.\d+\.self_attn\.[qkv]", Cut.COLUMN),
    (r"blocks\.\d+\.self_attn\.norm_[qk]", Cut.SHARDED_NORM),
    (r"blocks\.\d+\.self_attn\.o", Cut.ROW),
    (r"blocks\.\d+\.cross_attn\.[qkv]", Cut.COLUMN),
    (r"blocks\.\d+\.cross_attn\.norm_[qk]", Cut.SHARDED_NORM),
    (r"blocks\.\d+\.cross_attn\.o", Cut.ROW),
    (r"blocks\.\d+\.ffn\.0", Cut.COLUMN),
    (r"blocks\.\d+\.ffn\.2", Cut.ROW),
    (r"blocks\.\d+\.norm3", Cut.REPLICATED),
    (r"blocks\.\d+", Cut.REPLICATED),
    (r"(patch|text|time)_embedding(\.\d+)?", Cut.REPLICATED),
    (r"time_projection\.\d+", Cut.REPLICATED),
    (r"head(\.head)?", Cut.REPLICATED),
)
"""(pattern of a module's full name, cut of its own parameters); each module matches exactly one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Part start..stop-1 of `dim` of a full tensor."""

    dim: int
    start: int
    stop: int


def cut_of(module_name: str) -> Cut:
    """Cut of the module that owns a parameter. Raises KeyError for a name that the table does not know."""
    found = [cut for pattern, cut in PLAN if re.fullmatch(pattern, module_name)]
    if len(found) != 1:
        raise KeyError(
            f"{module_name!r} matches {len(found)} lines of the sharding plan instead of one"
        )
    return found[0]


def parameter_slice(
    name: str, shape: tuple[int, ...], *, tp_rank: int, tp_size: int
) -> Slice | None:
    """Which part of the full parameter `name` a tensor-parallel rank holds; None for all of it."""
    if tp_size == 1:
        return None
    module_name, _, leaf = name.rpartition(".")
    cut = cut_of(module_name)
    if cut is Cut.REPLICATED or (cut is Cut.ROW and leaf == "bias"):
        return None
    dim = 1 if cut is Cut.ROW else 0
    if shape[dim] % tp_size:
        raise ValueError(
            f"{name} has {shape[dim]} along dim {dim}, which tp{tp_size} does not divide"
        )
    part = shape[dim] // tp_size
    return Slice(dim=dim, start=tp_rank * part, stop=(tp_rank + 1) * part)
