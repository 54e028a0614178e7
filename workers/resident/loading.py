"""One transformer from its file to this rank's part of it, side by side with the plane's other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from comfy_wan_dist.ipc.errors import ConfigError, InsufficientMemoryError
from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.dtypes import COMPUTED
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.validate import validate_model
from comfy_wan_dist.model_file.lora import changed_shape
from comfy_wan_dist.model_file.wan import WanFile, read_wan_file
from workers.checkpoint.files import ModelFiles, Spec
from workers.checkpoint.load import load_weights, own_parts
from workers.checkpoint.lora import Changes, changed_parameters, merge_changes, read_changes
from workers.checkpoint.sharing import Milestone, ReadGroups, build_read_groups
from workers.job import Job, together
from workers.model.dtypes import dtype_named
from workers.model.wan import WanModel
from workers.parallel.compile import require_compiler
from workers.parallel.groups import MeshGroups, PlaneGroups
from workers.parallel.parallelize import cut_model, finish_model

from .fit import validate_memory
from .memory import Room
from .slot import HeldModel


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundModel:
    """The model that `spec` names. changes: what its LoRAs change. shape: with what they leave packed."""

    spec: ModelSpec
    file: WanFile
    changes: Changes
    shape: WanShape


@dataclass(frozen=True, kw_only=True)
class ModelLoader:
    """Loads transformers for one rank."""

    plane: PlaneGroups
    files: ModelFiles
    room: Room

    def recognise(self, spec: ModelSpec, degrees: MeshDegrees) -> FoundModel:
        """Read headers only. Raises ConfigError."""
        if spec.dtype not in COMPUTED:
            raise ConfigError(f"dtype {spec.dtype!r} is not known; use {', '.join(COMPUTED)}")
        file = read_wan_file(self.files.read(spec))
        validate_model(degrees, file.shape)
        changes = read_changes(spec.loras, self.files, file.shape)
        shape = changed_shape(file.shape, changes)
        return FoundModel(spec=spec, file=file, changes=changes, shape=shape)

    def validate_fits(self, found: FoundModel, groups: MeshGroups) -> None:
        """Raises InsufficientMemoryError if this rank's part does not fit beside what the device holds."""
        stage, dtype = groups.pp.rank, found.spec.dtype
        validate_memory(found.shape, groups.degrees, stage=stage, dtype=dtype, room=self.room)

    def fits(self, found: FoundModel, groups: MeshGroups) -> bool:
        try:
            self.validate_fits(found, groups)
        except InsufficientMemoryError:
            return False
        return True

    def load(
        self, found: FoundModel, groups: MeshGroups, report: Milestone, job: Job
    ) -> tuple[HeldModel, int]:
        """The model with its LoRAs, ready to be fitted to a job, and the bytes read.

        Collectives: votes, and those of `load_weights` and `merge_changes`.
        """
        spec, sharing, merged = found.spec, self._read_groups(), frozenset(found.changes)

        def allocate() -> WanModel:
            self.validate_fits(found, groups)
            dtype = dtype_named(spec.dtype)
            return cut_model(found.shape, groups, dtype=dtype, device=self.room.device)

        model = together(job, allocate)

        def fill() -> int:
            """Load, then merge what the LoRAs change, which is left out before; `report` hears of both as one."""
            whole = sum(part.file_bytes for part in own_parts(model, found.file, groups))
            bytes_read = load_weights(
                model,
                found.file,
                groups,
                sharing=sharing,
                milestone=lambda done, _, error: report(done, whole, error),
                leave_out=merged,
            )
            return bytes_read + self._merge(
                model,
                found,
                merged,
                groups,
                sharing,
                lambda done, total, error: report(whole - total + done, whole, error),
            )

        bytes_read = together(job, fill)
        if spec.compile:
            together(job, lambda: require_compiler(self.room.device))
        loaded = finish_model(model, groups, compile_backend="inductor" if spec.compile else None)
        return HeldModel(spec=spec, loaded=loaded, changes=found.changes), bytes_read

    def change_loras(
        self, held: HeldModel, found: FoundModel, groups: MeshGroups, report: Milestone, job: Job
    ) -> tuple[HeldModel, int]:
        """`held` with the LoRAs of `found` in place of its own, and the bytes read. An error leaves it changed in part.

        Collectives: a vote, and those of `merge_changes`.
        """
        names = changed_parameters(held.changes, found.changes)
        model, sharing = held.loaded.model, self._read_groups()
        bytes_read = together(
            job, lambda: self._merge(model, found, names, groups, sharing, report)
        )
        return HeldModel(spec=found.spec, loaded=held.loaded, changes=found.changes), bytes_read

    def _read_groups(self) -> ReadGroups:
        """Collectives: the making of groups that no earlier load needed, so not between two votes."""
        return build_read_groups(self.plane, local_ranks=self.room.local_ranks)

    def _merge(
        self,
        model: WanModel,
        found: FoundModel,
        names: frozenset[str],
        groups: MeshGroups,
        sharing: ReadGroups,
        report: Milestone,
    ) -> int:
        bytes_read = merge_changes(
            model,
            found.file,
            found.changes,
            groups,
            names=names,
            sharing=sharing,
            milestone=report,
        )
        specs: tuple[Spec, ...] = (found.spec, *found.spec.loras)
        for each in specs:
            self.files.read(each)  # still the same
        return bytes_read
