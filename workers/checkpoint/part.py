"""A rank's own part of one parameter: which rows and columns of the whole it is, and where its values lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from comfy_wan_dist.model_file.encoding import StoredTensor
from comfy_wan_dist.model_file.entry import TensorEntry
from workers.parallel.collectives import AxisGroup
from workers.parallel.fsdp import local_part
from workers.parallel.plan import Slice, parameter_slice

from .packed import PackedWeight, read_scale
from .reader import TensorReader


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """Part of the parameter `name`, which `stored` holds. As a matrix, all dims but the first are its columns.

    target: the rank's memory for it, contiguous. columns: None for all. packed: what holds it in the file's own form.
    """

    name: str
    stored: StoredTensor
    target: Tensor
    rows: range
    columns: Slice | None
    packed: PackedWeight | None = None

    @property
    def entry(self) -> TensorEntry:
        return self.stored.entry

    @property
    def own_columns(self) -> range:
        if self.columns is None:
            return range(prod(self.entry.shape[1:]))
        return range(self.columns.start, self.columns.stop)

    def load(self, reader: TensorReader) -> None:
        """Fill the rank's memory from the file. Raises ModelFileError."""
        rows = as_slice(self.rows)
        if self.packed is None:
            reader.read_into(self.target, self.entry, rows=rows, columns=self.columns)
            return
        reader.read_into(
            self.target.view(torch.uint8),
            self.stored.as_bytes,
            rows=rows,
            columns=None if self.columns is None else self.packed.stored,
        )
        if self.stored.scale is not None:
            read_scale(reader, self.stored.scale, self.packed, self.name)

    def read(self, reader: TensorReader, rows: range, columns: range) -> Tensor:
        """Any rows and columns of the parameter as the file has them, float32. Raises ModelFileError."""
        size = prod(self.entry.shape[1:])
        values = torch.empty(len(rows), len(columns), device=self.target.device)
        reader.read_into(
            values,
            replace(self.entry, shape=(self.entry.shape[0], size)),
            rows=as_slice(rows),
            columns=None
            if len(columns) == size
            else Slice(dim=1, start=columns.start, stop=columns.stop),
        )
        return values

    def write(self, values: Tensor, rows: range, columns: range) -> Tensor:
        """Keep what of `values`, at these rows and columns of the parameter, is the rank's own; returns it rounded."""
        first, stop = max(rows.start, self.rows.start), min(rows.stop, self.rows.stop)
        own = self.own_columns
        kept = values[
            first - rows.start : stop - rows.start,
            own.start - columns.start : own.stop - columns.start,
        ]
        place = self.target.view(len(self.rows), len(own))[
            first - self.rows.start : stop - self.rows.start
        ]
        return place.copy_(kept)


def own_part(
    name: str,
    parameter: Tensor,
    stored: StoredTensor,
    *,
    tp: AxisGroup,
    fsdp: AxisGroup,
    packed: PackedWeight | None = None,
) -> ParameterPart:
    """What this rank holds of the parameter `name`, as the sharding plan and fsdp cut it."""
    cut = parameter_slice(name, stored.shape, tp_rank=tp.rank, tp_size=tp.size)
    first = cut.start if cut is not None and cut.dim == 0 else 0
    target, rows = local_part(parameter, fsdp)
    return ParameterPart(
        name=name,
        stored=stored,
        target=target,
        rows=range(first + rows.start, first + rows.stop),
        columns=cut if cut is not None and cut.dim == 1 else None,
        packed=packed,
    )


def as_slice(rows: range) -> Slice:
    return Slice(dim=0, start=rows.start, stop=rows.stop)
