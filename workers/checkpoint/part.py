"""A rank's own part of one parameter: which rows and columns of the whole it is, and where its values lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from comfy_wan_dist.model_file.header import TensorEntry
from workers.parallel.collectives import AxisGroup
from workers.parallel.fsdp import local_part
from workers.parallel.plan import Slice, parameter_slice

from .reader import TensorReader


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """Part of the parameter that `entry` holds. As a matrix, all dims but the first are its columns.

    target: the rank's memory for it, contiguous. columns: None for all.
    """

    entry: TensorEntry
    target: Tensor
    rows: range
    columns: Slice | None

    @property
    def own_columns(self) -> range:
        if self.columns is None:
            return range(prod(self.entry.shape[1:]))
        return range(self.columns.start, self.columns.stop)

    def load(self, reader: TensorReader) -> None:
        """Fill the rank's memory from the file. Raises ModelFileError."""
        reader.read_into(self.target, self.entry, rows=as_slice(self.rows), columns=self.columns)

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
    name: str, parameter: Tensor, entry: TensorEntry, *, tp: AxisGroup, fsdp: AxisGroup
) -> ParameterPart:
    """What this rank holds of the parameter `name`, as the sharding plan and fsdp cut it."""
    cut = parameter_slice(name, entry.shape, tp_rank=tp.rank, tp_size=tp.size)
    first = cut.start if cut is not None and cut.dim == 0 else 0
    target, rows = local_part(parameter, fsdp)
    return ParameterPart(
        entry=entry,
        target=target,
        rows=range(first + rows.start, first + rows.stop),
        columns=cut if cut is not None and cut.dim == 1 else None,
    )


def as_slice(rows: range) -> Slice:
    return Slice(dim=0, start=rows.start, stop=rows.stop)
