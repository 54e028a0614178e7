"""A rank's own part of one parameter: its rows and columns of the whole, how the file has it, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from comfy_wan_dist.mesh.packing import Packing
from comfy_wan_dist.model_file.encoding import BLOCKS, PACKINGS, StoredTensor
from comfy_wan_dist.model_file.wan import WanFile
from workers.model.pack import pack_q8_0
from workers.model.unpack import unpack_blocks
from workers.model.wan import WanModel
from workers.parallel.collectives import AxisGroup
from workers.parallel.fsdp import local_part
from workers.parallel.plan import Slice, parameter_slice

from .packed import PackedWeight, official_name, packed_weights, read_scale
from .reader import TensorReader


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """Part of the parameter `name`, of which `stored` is the whole. As a matrix, all dims but the first are columns.

    target: the rank's memory for it, contiguous. packed: what that belongs to if it is quantised. columns: of the
    sharding plan; None for all.
    """

    name: str
    stored: StoredTensor
    target: Tensor
    packed: PackedWeight | None
    rows: range
    columns: Slice | None

    @property
    def file_bytes(self) -> int:
        """Of the whole parameter."""
        return self.stored.entry.stop - self.stored.entry.start

    @property
    def width(self) -> int:
        """Columns of the whole parameter."""
        return prod(self.stored.shape[1:])

    @property
    def own_columns(self) -> range:
        """Those that the rank's memory has values of; of packed ones all in its blocks."""
        if self.packed is not None and self.packed.encoding in BLOCKS:
            items, size = BLOCKS[self.packed.encoding]
            return range(
                self.packed.stored.start // size * items, self.packed.stored.stop // size * items
            )
        if self.columns is None:
            return range(self.width)
        return range(self.columns.start, self.columns.stop)

    def load(self, reader: TensorReader) -> None:
        """Fill the rank's memory with what the file has. Raises ModelFileError."""
        rows = Slice(dim=0, start=self.rows.start, stop=self.rows.stop)
        if self.packed is None:
            reader.read_into(self.target, self.stored.entry, rows=rows, columns=self.columns)
            return
        columns = None if self.columns is None else self.packed.stored
        bytes_of_it = self.target.view(torch.uint8)
        reader.read_into(bytes_of_it, self.stored.as_bytes, rows=rows, columns=columns)
        if self.stored.scale is not None:
            assert self.packed.scale is not None
            self.packed.scale.fill_(read_scale(reader, self.stored.scale, self.name))

    def read(self, reader: TensorReader, rows: range, columns: range) -> Tensor:
        """Any rows and columns of the parameter as the file has them, float32. Raises ModelFileError."""
        entry, device = self.stored.entry, self.target.device
        packing: Packing = PACKINGS[entry.dtype]
        blocks = packing.covering(columns.start, columns.stop)
        of_rows = Slice(dim=0, start=rows.start, stop=rows.stop)
        if entry.dtype in BLOCKS:
            size = packing.size
            data = torch.empty(len(rows), len(blocks) * size, dtype=torch.uint8, device=device)
            part = Slice(dim=1, start=blocks.start * size, stop=blocks.stop * size)
            reader.read_into(data, self.stored.as_bytes, rows=of_rows, columns=part)
            first = columns.start - blocks.start * packing.items
            return unpack_blocks(data, entry.dtype).narrow(1, first, len(columns)).contiguous()
        values = torch.empty(len(rows), len(columns), device=device)
        reader.read_into(
            values,
            replace(entry, shape=(entry.shape[0], self.width)),
            rows=of_rows,
            columns=None
            if len(columns) == self.width
            else Slice(dim=1, start=columns.start, stop=columns.stop),
        )
        if self.stored.scale is not None:
            values.mul_(read_scale(reader, self.stored.scale, self.name))
        return values

    def write(self, values: Tensor, rows: range, columns: range) -> bool:
        """Keep what of `values`, at these rows and columns of the parameter, is the rank's own.

        Returns whether all of it is finite as it is kept. A packed parameter must be held as Q8_0.
        """
        first, stop = max(rows.start, self.rows.start), min(rows.stop, self.rows.stop)
        own = self.own_columns
        kept = values[
            first - rows.start : stop - rows.start,
            own.start - columns.start : own.stop - columns.start,
        ]
        place = self.target.view(len(self.rows), -1)[
            first - self.rows.start : stop - self.rows.start
        ]
        if self.packed is None:
            return bool(torch.isfinite(place.copy_(kept)).all())
        assert self.packed.encoding == "Q8_0"
        place.copy_(pack_q8_0(kept))
        return bool(torch.isfinite(unpack_blocks(place, "Q8_0")).all())


def own_parts(
    model: WanModel, file: WanFile, *, tp: AxisGroup, fsdp: AxisGroup
) -> Sequence[ParameterPart]:
    """What this rank holds, as the sharding plan and fsdp cut it, in the order of the file: one forward pass."""
    packed = packed_weights(model)
    parts = []
    for held_as, parameter in model.named_parameters():
        name = official_name(held_as)
        stored = file.entries[name]
        cut = parameter_slice(name, stored.shape, tp_rank=tp.rank, tp_size=tp.size)
        first = cut.start if cut is not None and cut.dim == 0 else 0
        target, rows = local_part(parameter, fsdp)
        parts.append(
            ParameterPart(
                name=name,
                stored=stored,
                target=target,
                packed=packed.get(name),
                rows=range(first + rows.start, first + rows.stop),
                columns=cut if cut is not None and cut.dim == 1 else None,
            )
        )
    return sorted(parts, key=lambda part: (part.stored.entry.path, part.stored.entry.start))
