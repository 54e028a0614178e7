"""A transformer's way from its files into a slot: recognised, allocated, read, its LoRAs merged, made parallel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from comfy_wan_dist.ipc.dtypes import require_compute_dtype
from comfy_wan_dist.ipc.errors import ConfigError, InsufficientMemoryError
from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.validate import validate_model
from comfy_wan_dist.model_file.lora import changed_shape
from comfy_wan_dist.model_file.wan import WanFile, read_wan_file
from workers.checkpoint.files import ModelFiles, Spec
from workers.checkpoint.load import load_weights, torch_dtype
from workers.checkpoint.lora import Changes, changed_parameters, merge_changes, read_changes
from workers.checkpoint.part import own_parts
from workers.checkpoint.sharing import Milestone, build_read_groups
from workers.job import Job, together
from workers.model.wan import WanModel
from workers.parallel.groups import MeshGroups, PlaneGroups
from workers.parallel.parallelize import ParallelModel, cut_model, finish_model

from .fit import validate_memory
from .memory import Room
from .slot import HeldModel, ModelSlot


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A transformer as its files' headers tell it. changes: what its LoRAs make of the weights."""

    spec: ModelSpec
    file: WanFile
    changes: Changes

    @property
    def shape(self) -> WanShape:
        """As it is held, LoRAs merged."""
        return changed_shape(self.file.shape, self.changes)


class TransformerLoader:
    """Fills slots of one rank. bytes_read: what was asked of files since it was last set to 0."""

    def __init__(
        self, *, plane: PlaneGroups, local_ranks: int, files: ModelFiles, room: Room
    ) -> None:
        """local_ranks: how many of the plane's ranks are on each machine."""
        self.bytes_read = 0
        self._plane = plane
        self._local_ranks = local_ranks
        self._files = files
        self._room = room

    def recognise(self, spec: ModelSpec, degrees: MeshDegrees) -> KnownModel:
        """Read the headers again. Raises ConfigError, ModelFileError, MeshError."""
        require_compute_dtype(spec.dtype)
        file = read_wan_file(self._files.read(spec))
        validate_model(degrees, file.shape)
        changes = read_changes(spec.loras, self._files, file.shape)
        return KnownModel(spec=spec, file=file, changes=changes)

    def validate_memory(self, known: KnownModel, groups: MeshGroups) -> None:
        """Refuse what does not fit beside what is there. Raises InsufficientMemoryError."""
        validate_memory(
            known.shape,
            groups.degrees,
            stage=groups.pp.rank,
            dtype=known.spec.dtype,
            local_ranks=self._local_ranks,
            device=self._room.device,
            free_bytes=self._room.free(),
        )

    def lacks_memory(self, known: KnownModel, groups: MeshGroups) -> bool:
        """Whether `validate_memory` would refuse it."""
        try:
            self.validate_memory(known, groups)
        except InsufficientMemoryError:
            return True
        return False

    def load(
        self, slot: ModelSlot, known: KnownModel, groups: MeshGroups, job: Job, report: Milestone
    ) -> ParallelModel:
        """Load into an empty slot. Collectives: votes, and those of the reads."""
        spec, device = known.spec, self._room.device

        def allocate() -> WanModel:
            self.validate_memory(known, groups)
            return cut_model(known.shape, groups, dtype=torch_dtype(spec.dtype), device=device)

        model = together(job, allocate)
        self.bytes_read += together(job, lambda: self._read(model, known, groups, report))
        if spec.compile:
            together(job, lambda: require_compiler(device))
        loaded = finish_model(model, groups, compile_backend="inductor" if spec.compile else None)
        slot.held = HeldModel(spec=spec, loaded=loaded, changes=known.changes)
        return loaded

    def change_loras(
        self, slot: ModelSlot, known: KnownModel, groups: MeshGroups, job: Job, report: Milestone
    ) -> ParallelModel:
        """Read anew what differs from the slot's model, which has the same base. Collectives: as in `load`."""
        held = slot.held
        assert held is not None
        slot.held = (
            None  # a model that is changed in part would be neither the old one nor the new one
        )
        names = changed_parameters(held.changes, known.changes)
        model = held.loaded.model
        self.bytes_read += together(job, lambda: self._merge(model, known, names, groups, report))
        slot.held = HeldModel(spec=known.spec, loaded=held.loaded, changes=known.changes)
        return held.loaded

    def _read(
        self, model: WanModel, known: KnownModel, groups: MeshGroups, report: Milestone
    ) -> int:
        """Fill a model; returns the bytes asked of the files."""
        names = frozenset(known.changes)
        whole = sum(part.file_bytes for part in own_parts(model, known.file, groups))

        def reading(done: int, total: int, error: Exception | None) -> None:
            report(done, whole, error)

        def merging(done: int, total: int, error: Exception | None) -> None:
            report(whole - total + done, whole, error)

        sharing = build_read_groups(self._plane, local_ranks=self._local_ranks)
        bytes_read = load_weights(
            model, known.file, groups, sharing=sharing, milestone=reading, leave_out=names
        )
        return bytes_read + self._merge(model, known, names, groups, merging)

    def _merge(
        self,
        model: WanModel,
        known: KnownModel,
        names: frozenset[str],
        groups: MeshGroups,
        report: Milestone,
    ) -> int:
        """Fill the parameters `names` with the file's values and the LoRAs' changes; returns the bytes asked."""
        bytes_read = merge_changes(
            model,
            known.file,
            known.changes,
            groups,
            names=names,
            sharing=build_read_groups(self._plane, local_ranks=self._local_ranks),
            milestone=report,
        )
        named: tuple[Spec, ...] = (known.spec, *known.spec.loras)
        for each in named:
            self._files.read(each)  # still the same
        return bytes_read


def require_compiler(device: torch.device) -> None:
    """Compile something small. Raises ConfigError where torch.compile does not work."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:
        raise ConfigError(
            f"torch.compile does not work here ({str(error).strip().splitlines()[0][:200]}); "
            "install a C++ compiler or switch compile off"
        ) from error
