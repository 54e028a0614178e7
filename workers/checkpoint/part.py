"""A rank's own part of one parameter: which rows and columns of the whole it is, and where its values lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from comfy_wan_dist.model_file.encoding import StoredTensor
from comfy_wan_dist.model_file.entry import TensorEntry
from workers.parallel.collectives import AxisGroup, lone_rank
from workers.parallel.fsdp import local_part
from workers.parallel.plan import Slice, parameter_slice

from .packed import PackedWeight
from .sharing import ReadGroups, SharedReader


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """Part of the parameter `name`, which `stored` holds. As a matrix, all dims but the first are its columns.

    target: the rank's memory for it, contiguous. columns: None for all. packed: what holds it in the file's own form.
    peer_columns: of each tp rank, as bytes of a row if packed; none if all have all columns.
    is_shared: whether fsdp cuts it. is_whole: whether all ranks of the stage hold all of it.
    """

    name: str
    stored: StoredTensor
    target: Tensor
    rows: range
    columns: Slice | None
    packed: PackedWeight | None = None
    peer_columns: tuple[Slice, ...] = ()
    is_shared: bool = False
    is_whole: bool = False

    @property
    def entry(self) -> TensorEntry:
        return self.stored.entry

    @property
    def own_columns(self) -> range:
        if self.columns is None:
            return range(prod(self.entry.shape[1:]))
        return range(self.columns.start, self.columns.stop)

    def load(self, reader: SharedReader) -> None:
        """Fill the rank's memory from the file."""
        packed = self.packed
        columns = self.columns
        if packed is not None and columns is not None:
            columns = packed.stored
        reader.read_into(
            self.target if packed is None else self.target.view(torch.uint8),
            self.entry if packed is None else self.stored.as_bytes,
            holders=self.holders(reader.groups),
            rows=as_slice(self.rows),
            columns=columns,
            peer_columns=self.peer_columns,
        )
        if packed is not None and self.stored.scale is not None:
            scale = torch.empty(1, device=self.target.device)
            reader.read_into(scale, self.stored.scale, holders=reader.groups.everyone)
            reader.attempt(lambda: packed.set_scale(scale, self.name))

    def read(self, reader: SharedReader, rows: range, columns: range) -> Tensor:
        """Any rows and columns of the parameter as the file has them, float32."""
        size = prod(self.entry.shape[1:])
        values = torch.empty(len(rows), len(columns), device=self.target.device)
        is_whole = len(columns) == size
        reader.read_into(
            values,
            replace(self.entry, shape=(self.entry.shape[0], size)),
            holders=self.holders(reader.groups),
            rows=as_slice(rows),
            columns=None if is_whole else Slice(dim=1, start=columns.start, stop=columns.stop),
            peer_columns=() if is_whole else self.peer_columns,
        )
        return values

    def holders(self, groups: ReadGroups) -> AxisGroup:
        """Who reads the same of this parameter."""
        if self.is_whole:
            return groups.everyone
        return lone_rank("read") if self.is_shared else groups.replicas

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
    cuts = [
        parameter_slice(name, stored.shape, tp_rank=rank, tp_size=tp.size)
        for rank in range(tp.size)
    ]
    cut = cuts[tp.rank]
    first = cut.start if cut is not None and cut.dim == 0 else 0
    target, rows = local_part(parameter, fsdp)
    is_shared = target is not parameter
    columns = tuple(each for each in cuts if each is not None and each.dim == 1)
    return ParameterPart(
        name=name,
        stored=stored,
        target=target,
        rows=range(first + rows.start, first + rows.stop),
        columns=columns[tp.rank] if columns else None,
        packed=packed,
        peer_columns=columns if packed is None else tuple(map(packed.stored_of, columns)),
        is_shared=is_shared,
        is_whole=cut is None and not is_shared,
    )


def as_slice(rows: range) -> Slice:
    return Slice(dim=0, start=rows.start, stop=rows.stop)
