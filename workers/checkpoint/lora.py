"""Merge LoRAs into a rank's own part of the weights, in float32, rounded once.

A parameter's old values are read from the model file again, never undone: whatever was merged before, the result is
that of a fresh load. Of a file's matrices only what the rank's part needs is read.
DoRA, whose lengths are those of whole rows or columns, and what has other rows than the parameter, is computed on the
whole parameter by every rank that has a part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError, ModelFileError
from comfy_wan_dist.ipc.messages import LoraSpec
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.lora import read_lora
from comfy_wan_dist.model_file.lora_names import Role
from comfy_wan_dist.model_file.lora_patch import DoraAxis, Factor, Kind, Patch, extent
from comfy_wan_dist.model_file.wan import WanFile
from workers.model.wan import WanModel
from workers.parallel.groups import MeshGroups

from .files import ModelFiles
from .load import ParameterPart, own_parts
from .reader import TensorReader
from .sharing import Milestone, ReadGroups, SharedReader, in_sections

PIECE_ITEMS = 16 * 2**20
"""How many values are changed at once: 64 MiB in float32, and as much again for the change."""
EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What one LoRA does to one parameter. Equal changes of equal weights give equal weights."""

    lora: LoraSpec
    label: str
    patch: Patch


Changes = Mapping[str, tuple[Change, ...]]
"""By name of the parameter, in the order in which they are made."""


def read_changes(loras: Sequence[LoraSpec], files: ModelFiles, shape: WanShape) -> Changes:
    """What `loras` change in a model of `shape`. Reads headers only. Raises ModelFileError."""
    changes: dict[str, tuple[Change, ...]] = {}
    for lora in loras:
        file = read_lora(files.read(lora), shape, half=lora.half)
        for parameter, patch in file.patches.items():
            change = Change(lora=lora, label=file.label, patch=patch)
            changes[parameter] = (*changes.get(parameter, ()), change)
    return changes


def changed_parameters(old: Changes, new: Changes) -> frozenset[str]:
    """Parameters that have other values by `new` than by `old`."""
    return frozenset(name for name in {**old, **new} if old.get(name) != new.get(name))


def merge_changes(
    model: WanModel,
    file: WanFile,
    changes: Changes,
    groups: MeshGroups,
    *,
    names: Collection[str],
    sharing: ReadGroups,
    milestone: Milestone,
) -> int:
    """Give those parameters of `names` that this rank has the file's values with all changes; returns bytes read.

    An error leaves the model changed in part. Collectives: those of the milestones and of `SharedReader`.
    Raises ModelFileError, and ConfigError if a value becomes infinite.
    """
    parts = [part for part in own_parts(model, file, groups) if part.name in names]
    with SharedReader(sharing) as reader, torch.no_grad():
        for section, done, total in in_sections(parts, lambda part: part.file_bytes):
            with reader.in_step():
                for part in section:
                    _merge(reader, part, changes.get(part.name, ()))
            milestone(done, total, reader.error)
        return reader.bytes_read


def _merge(reader: SharedReader, part: ParameterPart, changes: Sequence[Change]) -> None:
    if not part.target.numel():
        return
    rows, columns = part.rows, part.own_columns
    step = max(1, PIECE_ITEMS // len(columns))
    if any(change.patch.dora is not None or change.patch.is_reshaped for change in changes):
        rows, columns = range(part.stored.shape[0]), range(part.width)
        step = len(rows)
    local: list[LocalChange] = []

    def prepare() -> None:
        for change in changes:
            local.append(
                LocalChange(
                    reader=reader.alone,
                    change=change,
                    rows=rows,
                    columns=columns,
                    device=part.target.device,
                )
            )

    reader.attempt(prepare)
    for first in range(rows.start, rows.stop, step):
        piece = range(first, min(first + step, rows.stop))
        values = part.read(reader, piece, columns)
        reader.attempt(functools.partial(_merge_piece, part, local, values, piece, columns))


def _merge_piece(
    part: ParameterPart, changes: Sequence[LocalChange], values: Tensor, rows: range, columns: range
) -> None:
    for each in changes:
        values = each.apply(values, rows)
    if not part.write(values, rows, columns):
        by = ", ".join(each.name for each in changes)
        raise ConfigError(
            f"{part.name} becomes NaN or infinite with {by or 'no LoRA'}; lower the strength, or use the dtype "
            "bfloat16 or float32"
        )


class LocalChange:
    """A change of some rows and columns of a parameter, with the factors that it needs there."""

    def __init__(
        self,
        *,
        reader: TensorReader,
        change: Change,
        rows: range,
        columns: range,
        device: torch.device,
    ) -> None:
        self._reader = reader
        self._label = change.label
        self._patch = change.patch
        self._strength = change.lora.strength
        self.name = f"{change.label} at strength {change.lora.strength:g}"
        self._rows, self._columns = rows, columns
        if change.patch.is_reshaped:
            self._rows, self._columns = map(range, extent(change.patch))
        self._device = device
        # Products are small; differences and values are read piece by piece.
        self._factors = {
            role: self._read(factor, *self._needed(role, factor))
            for role, factor in change.patch.factors.items()
            if change.patch.kind not in (Kind.DIFFERENCE, Kind.VALUE)
        }

    def apply(self, values: Tensor, rows: range) -> Tensor:
        """`values` [rows, columns], the given rows of the change's columns, after the change."""
        kind, scale = self._patch.kind, self._strength * self._patch.scale
        if kind in (Kind.DIFFERENCE, Kind.VALUE):
            (factor,) = self._patch.factors.values()
            given = self._read(factor, rows, self._columns)
            return given if kind is Kind.VALUE else values.add_(given.mul_(scale))
        change = self._product(self._rows if self._patch.is_reshaped else rows).view_as(values)
        if self._patch.dora is None:
            return values.add_(change.mul_(scale))
        return self._scale_by_dora(values, change.mul_(self._patch.scale))

    def _needed(self, role: Role, factor: Factor) -> tuple[range, range]:
        """Rows and columns of a factor for those of the change."""
        rows, columns = range(factor.rows), range(factor.columns)
        if role in (Role.UP, Role.HADA_W1_A, Role.HADA_W2_A):
            return self._rows, columns
        if role in (Role.DOWN, Role.HADA_W1_B, Role.HADA_W2_B):
            return rows, self._columns
        return rows, columns

    def _product(self, rows: range) -> Tensor:
        factors = self._factors
        own = slice(rows.start - self._rows.start, rows.stop - self._rows.start)
        if self._patch.kind is Kind.LORA:
            return factors[Role.UP][own] @ factors[Role.DOWN]
        if self._patch.kind is Kind.LOHA:
            first = factors[Role.HADA_W1_A][own] @ factors[Role.HADA_W1_B]
            return first.mul_(factors[Role.HADA_W2_A][own] @ factors[Role.HADA_W2_B])
        return self._kronecker_product(rows)

    def _kronecker_product(self, rows: range) -> Tensor:
        """Those rows and columns of the Kronecker product of w1 and w2.

        Its element (r, c) is w1[r // R, c // C] * w2[r % R, c % C], where w2 is R x C.
        """
        w1, w2 = (
            self._factors[whole]
            if whole in self._factors
            else self._factors[left] @ self._factors[right]
            for whole, left, right in (
                (Role.LOKR_W1, Role.LOKR_W1_A, Role.LOKR_W1_B),
                (Role.LOKR_W2, Role.LOKR_W2_A, Role.LOKR_W2_B),
            )
        )
        r, c = (
            torch.arange(each.start, each.stop, device=self._device)
            for each in (rows, self._columns)
        )
        height, width = w2.shape
        return w1[(r // height)[:, None], c // width].mul_(w2[(r % height)[:, None], c % width])

    def _scale_by_dora(self, values: Tensor, change: Tensor) -> Tensor:
        """Give the sum's rows or columns the lengths that the file holds.

        As ComfyUI does, rows are divided by the lengths that they had before the change, columns by those after it.
        """
        changed = values + change
        lengths = self._factors[Role.DORA]
        if self._patch.dora is DoraAxis.ROWS:
            before = torch.linalg.vector_norm(values, dim=1, keepdim=True)
            changed *= lengths / (before + EPSILON)
        else:  # of a convolution several columns each
            columns = changed.view(len(changed), lengths.numel(), -1)
            after = torch.linalg.vector_norm(columns, dim=(0, 2), keepdim=True)
            columns *= lengths.view(1, -1, 1) / (after + EPSILON)
        if self._strength == 1:
            return changed
        return values.add_(changed.sub_(values).mul_(self._strength))

    def _read(self, factor: Factor, rows: range, columns: range) -> Tensor:
        """[rows, columns] of a factor in float32. Raises ModelFileError, also for values that are not finite."""
        values = torch.empty(len(rows), len(columns), device=self._device)
        entry = factor.entry
        row_bytes = entry.size // factor.rows
        item_bytes = row_bytes // factor.columns
        # One run of bytes if rows are whole, else one for each row.
        runs = (
            [(values, rows)]
            if len(columns) == factor.columns
            else [(values[index], range(row, row + 1)) for index, row in enumerate(rows)]
        )
        for target, run in runs:
            start = entry.start + run.start * row_bytes + columns.start * item_bytes
            self._reader.read_into(
                target,
                replace(
                    entry,
                    shape=(target.numel(),),
                    start=start,
                    stop=start + target.numel() * item_bytes,
                ),
            )
        if not bool(torch.isfinite(values).all()):
            raise ModelFileError(
                f"{self._label}: {factor.name!r} holds values that are NaN or infinite; download it again"
            )
        return values
