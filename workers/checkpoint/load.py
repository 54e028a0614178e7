"""Stream a rank's own part of the weights out of a file: of each parameter its rows and columns, as the file has them.

Peak memory is the rank's own shard and one read buffer, and where values are unpacked on their way its part of one
parameter in float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.dtypes import BLOCKS, PACKINGS
from comfy_wan_dist.mesh.parameters import parameter_slice
from comfy_wan_dist.model_file.encoding import StoredTensor
from comfy_wan_dist.model_file.wan import WanFile
from workers.model.dtypes import dtype_coded
from workers.model.wan import WanModel
from workers.parallel.collectives import AxisGroup, lone_rank
from workers.parallel.fsdp import local_part
from workers.parallel.groups import MeshGroups
from workers.quant.blocks import pack_q8_0, unpack_blocks
from workers.quant.packed import PackedWeight, official_name, packed_weights, stored_of

from .sharing import Milestone, ReadGroups, SharedReader, in_sections


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """Part of the parameter `name`, of which `stored` is the whole. As a matrix, all dims but the first are columns.

    target: the rank's memory for it, contiguous. packed: what that belongs to if it is quantised. columns: of the
    sharding plan; None for all. peer_columns: those of every tp rank; none if all have all. is_shared: whether fsdp
    cuts it. is_whole: whether all ranks of the stage hold all of it.
    """

    name: str
    stored: StoredTensor
    target: Tensor
    packed: PackedWeight | None
    rows: range
    columns: range | None
    peer_columns: tuple[range, ...]
    is_shared: bool
    is_whole: bool

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole parameter in the file."""
        return self.stored.entry.size

    @property
    def width(self) -> int:
        """Columns of the whole parameter."""
        return prod(self.stored.shape[1:])

    @property
    def own_columns(self) -> range:
        """Those that the rank's memory has values of; of packed ones all in its blocks."""
        if self.packed is not None:
            stored, packing = self.packed.stored, self.packed.packing
            first, stop = (place // packing.size for place in (stored.start, stored.stop))
            return range(first * packing.items, stop * packing.items)
        return range(self.width) if self.columns is None else self.columns

    def holders(self, groups: ReadGroups) -> AxisGroup:
        """Who reads the same of this parameter."""
        if self.is_whole:
            return groups.everyone
        return lone_rank("read") if self.is_shared else groups.replicas

    def load(self, reader: SharedReader) -> None:
        """Fill the rank's memory with what the file has."""
        if self.packed is None and (self.stored.scale or self.stored.entry.dtype in BLOCKS):
            if self.target.numel():
                values = self.read(reader, self.rows, self.own_columns)
                self.write(values, self.rows, self.own_columns)
            return
        target, entry, packed = self.target, self.stored.entry, self.packed
        columns, peer_columns = self.columns, self.peer_columns
        if packed is not None:
            target, entry = target.view(torch.uint8), self.stored.as_bytes
            columns = None if columns is None else packed.stored
            peer_columns = tuple(stored_of(each, packed.packing) for each in peer_columns)
        reader.read_into(
            target,
            entry,
            holders=self.holders(reader.groups),
            rows=self.rows,
            columns=columns,
            peer_columns=peer_columns,
        )
        if packed is not None and packed.scale is not None:
            packed.scale.fill_(self._scale(reader))

    def read(self, reader: SharedReader, rows: range, columns: range) -> Tensor:
        """Any rows and columns of the parameter as the file has them, float32."""
        entry, device = self.stored.entry, self.target.device
        holders = self.holders(reader.groups)
        if entry.dtype in BLOCKS and not self.stored.is_packed:
            # Small, and its rows may be no whole blocks.
            data = torch.zeros(1, entry.size, dtype=torch.uint8, device=device)
            reader.read_into(data, replace(entry, dtype="U8", shape=(entry.size,)), holders=holders)
            values = unpack_blocks(data, entry.dtype).view(entry.shape[0], -1)
            return values[rows.start : rows.stop, columns.start : columns.stop].contiguous()
        if entry.dtype in BLOCKS:
            packing = PACKINGS[entry.dtype]
            part = stored_of(columns, packing)
            data = torch.zeros(len(rows), len(part), dtype=torch.uint8, device=device)
            reader.read_into(data, self.stored.as_bytes, holders=holders, rows=rows, columns=part)
            values = unpack_blocks(data, entry.dtype)
            return values.narrow(1, columns.start % packing.items, len(columns)).contiguous()
        values = torch.zeros(len(rows), len(columns), device=device)
        is_whole = len(columns) == self.width
        reader.read_into(
            values,
            replace(entry, shape=(entry.shape[0], self.width)),
            holders=holders,
            rows=rows,
            columns=None if is_whole else columns,
            # Packed again, the tp ranks' columns are of whole blocks, and not as many on each.
            peer_columns=() if is_whole or self.packed is not None else self.peer_columns,
        )
        if self.stored.scale is not None:
            if self.stored.rounded_to is not None:
                values = values.to(dtype_coded(self.stored.rounded_to)).float()
            values.mul_(self._scale(reader))
        return values

    def _scale(self, reader: SharedReader) -> float:
        """The weight's scale. `reader` keeps ModelFileError for one that no weight can have."""
        assert self.stored.scale is not None
        scale = torch.ones(1, device=self.target.device)
        reader.read_into(scale, self.stored.scale, holders=self.holders(reader.groups))
        value = scale.item()
        reader.attempt(lambda: validate_scale(value, self.name))
        return value

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


def own_parts(model: WanModel, file: WanFile, groups: MeshGroups) -> Sequence[ParameterPart]:
    """What this rank holds, as the sharding plan and fsdp cut it, in the order of the file: one forward pass."""
    packed = packed_weights(model)
    parts = []
    for held_as, parameter in model.named_parameters():
        name = official_name(held_as)
        stored = file.entries[name]
        cuts = [
            parameter_slice(name, stored.shape, tp_rank=rank, tp_size=groups.tp.size)
            for rank in range(groups.tp.size)
        ]
        cut = cuts[groups.tp.rank]
        first = cut.start if cut is not None and cut.dim == 0 else 0
        target, rows = local_part(parameter, groups.fsdp)
        columns = tuple(range(each.start, each.stop) for each in cuts if each and each.dim == 1)
        is_shared = target is not parameter
        parts.append(
            ParameterPart(
                name=name,
                stored=stored,
                target=target,
                packed=packed.get(name),
                rows=range(first + rows.start, first + rows.stop),
                columns=columns[groups.tp.rank] if columns else None,
                peer_columns=columns,
                is_shared=is_shared,
                is_whole=cut is None and not is_shared,
            )
        )
    return sorted(parts, key=lambda part: (part.stored.entry.path, part.stored.entry.start))


def load_weights(
    model: WanModel,
    file: WanFile,
    groups: MeshGroups,
    *,
    sharing: ReadGroups,
    milestone: Milestone,
    leave_out: Collection[str] = (),
) -> int:
    """Stream the file's weights into `model`, but for the parameters `leave_out`; returns the bytes asked of the file.

    Collectives: those of the milestones and of `SharedReader`. Raises ModelFileError.
    """
    parts = [part for part in own_parts(model, file, groups) if part.name not in leave_out]
    with SharedReader(sharing) as reader, torch.no_grad():
        for section, done, total in in_sections(parts, lambda part: part.file_bytes):
            with reader.in_step():
                for part in section:
                    part.load(reader)
            milestone(done, total, reader.error)
        return reader.bytes_read


def validate_scale(scale: float, name: str) -> None:
    if not 0 <= scale < math.inf:
        raise ModelFileError(
            f"the scale of {name} is {scale}, which must be finite and not negative; the file is damaged: download it "
            "again"
        )
