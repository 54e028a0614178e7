"""Weights that stay in memory as a quantised file has them, and exist in the model's dtype only while they are used.

A linear reads `self.weight` as ever; here that is a property which unpacks. So the model, tensor parallelism and the
loader know nothing of formats, and what a rank holds of a matrix is what it would hold of any other: rows for a column
cut, columns for a row cut. Blocks are not cut: a rank holds those that its columns lie in, and what they have too much
is left out after they are unpacked. A scale belongs to the whole weight, and all its shards share it.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor, nn

from comfy_wan_dist.mesh.dtypes import BLOCKS, Packing
from workers.model.dtypes import dtype_coded
from workers.model.wan import WanModel

from .blocks import unpack_blocks


class PackedWeight(nn.Module):
    """A rank's part of a matrix, [rows, columns], in the file's own form.

    data: fp8 [rows, columns], or blocks as uint8 [rows, bytes]. scale: float32, one number, if the file has one.
    stored: which bytes of the file's rows `data` holds.
    """

    scale: Tensor | None

    def __init__(self, packing: Packing, held: Tensor, *, first: int) -> None:
        """held: the meta tensor whose place this takes. first: which column of the full matrix its first one is."""
        super().__init__()
        rows, columns = held.shape
        self.packing = packing
        self.encoding = packing.encoding
        self.dtype = held.dtype
        self.skipped = first % packing.items
        self.columns = columns
        self.stored = stored_of(range(first, first + columns), packing)
        dtype = dtype_coded("U8" if packing.encoding in BLOCKS else packing.encoding)
        data = torch.empty(rows, len(self.stored), dtype=dtype, device=held.device)
        self.data = nn.Parameter(data, requires_grad=False)
        scale = torch.empty((), device=held.device) if packing.is_scaled else None
        self.register_buffer("scale", scale)

    def forward(self) -> Tensor:
        """The values, [rows, columns] in the model's dtype."""
        if self.encoding in BLOCKS:
            values = unpack_blocks(self.data, self.encoding)
            return values.narrow(1, self.skipped, self.columns).to(self.dtype)
        if self.scale is None:
            return self.data.to(self.dtype)
        return self.data.float().mul_(self.scale).to(self.dtype)


def stored_of(columns: range, packing: Packing) -> range:
    """The bytes of a packed matrix's row in which those columns lie."""
    blocks = packing.covering(columns.start, columns.stop)
    return range(blocks.start * packing.size, blocks.stop * packing.size)


class _UnpacksWeight:
    """A linear's part: its `weight` is unpacked anew whenever it is read."""

    packed: PackedWeight

    @property
    def weight(self) -> Tensor:
        return self.packed()


@functools.cache  # compiled code is guarded by types, so every load must give the same
def _unpacking(linear: Any) -> type[nn.Module]:
    """A kind of linear as it is, but that it unpacks its weight."""
    return type(f"Packed{linear.__name__}", (_UnpacksWeight, linear), {})


def apply_packing(model: WanModel) -> None:
    """Let the linears whose weights the model's shape names as packed keep them so.

    Call it on the meta device, after the cuts that change a linear's kind or shape; a plain model stays as it is.
    """
    packed = dict(model.shape.packed)
    for name, module in list(model.named_modules()):
        packing = packed.get(f"{name}.weight")
        if packing is None:
            continue
        held = module.weight
        assert isinstance(held, Tensor)
        # A row-parallel linear's columns are its rank's run of the full matrix's.
        first = int(getattr(module, "first_column", 0))
        del module.weight
        module.__class__ = _unpacking(type(module))  # type: ignore[arg-type]  # as torch's own parametrizations do
        module.packed = PackedWeight(packing, held, first=first)


def official_name(parameter: str) -> str:
    """The official name of a parameter as the model has it: what is packed stands for the weight."""
    return re.sub(r"\.packed\.data$", ".weight", parameter)


def packed_weights(model: WanModel) -> dict[str, PackedWeight]:
    """By the official name of the parameter that each stands for."""
    return {
        official_name(f"{name}.data"): module
        for name, module in model.named_modules()
        if isinstance(module, PackedWeight)
    }
