"""A transformer as one rank holds it between jobs, on its device or parked, and its fitting to a job."""

from __future__ import annotations

from dataclasses import dataclass, replace

from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.shards import TokenShards
from workers.checkpoint.lora import Changes
from workers.model.wan import WanModel
from workers.parallel.compile import compile_blocks
from workers.parallel.context import apply_context_parallel
from workers.parallel.groups import MeshGroups
from workers.parallel.sequence import SequenceParallel, apply_sequence_parallel

from .offloaded import ParkedWeights, weight_bytes


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """`sequence` is there if the mesh has sp."""

    model: WanModel
    sequence: SequenceParallel | None

    def fit_to(self, shards: TokenShards, groups: MeshGroups) -> None:
        """Prepare the layers for a job whose tokens are cut as `shards` says."""
        apply_context_parallel(self.model, groups, shards.cp)
        if self.sequence is not None:
            self.sequence.sizes = shards.sp.sizes


def finish_model(
    model: WanModel, groups: MeshGroups, *, compile_backend: str | None
) -> LoadedModel:
    """What is applied after the weights are there: sequence parallelism, then compilation."""
    sequence = apply_sequence_parallel(model, groups.tp) if groups.degrees.sp else None
    if compile_backend is not None:
        compile_blocks(model, backend=compile_backend)
    return LoadedModel(model=model, sequence=sequence)


@dataclass(frozen=True, kw_only=True)
class HeldModel:
    """changes: what LoRAs have made of the file's weights."""

    spec: ModelSpec
    loaded: LoadedModel
    changes: Changes


class ModelSlot:
    """Room for one transformer. Its weights are on the device, or parked in host memory for a while."""

    def __init__(self) -> None:
        self.held: HeldModel | None = None
        self._parked: ParkedWeights | None = None

    def holds(self, spec: ModelSpec) -> bool:
        return self.held is not None and self.held.spec == spec

    def holds_base(self, spec: ModelSpec) -> bool:
        """Whether it is the spec's model, with the same LoRAs or others."""
        return self.held is not None and replace(self.held.spec, loras=spec.loras) == spec

    def differs_in_loras(self, spec: ModelSpec, shape: WanShape) -> bool:
        """Whether it is the spec's model, held as `shape` says, but for LoRAs."""
        return (
            self.held is not None
            and self.holds_base(spec)
            and self.held.loaded.model.shape == shape
        )

    def is_outdated_by(self, spec: ModelSpec) -> bool:
        """Whether it is of the spec's file as it was before."""
        if self.held is None or self.held.spec.path != spec.path:
            return False
        held = self.held.spec
        return (held.file_bytes, held.mtime_ns) != (spec.file_bytes, spec.mtime_ns)

    @property
    def is_parked(self) -> bool:
        return self._parked is not None

    @property
    def parked_bytes(self) -> int:
        """What `bring_back` needs room for."""
        return 0 if self._parked is None else self._parked.bytes

    def device_bytes(self) -> int:
        """Of its weights, as far as they are on the device."""
        return 0 if self.held is None else weight_bytes(self.held.loaded.model)

    def park(self) -> None:
        """Move the weights to host memory, if there are any on the device. Raises torch.OutOfMemoryError."""
        if self.held is not None and self._parked is None:
            self._parked = ParkedWeights(self.held.loaded.model)

    def bring_back(self) -> None:
        """Undo `park`. Raises torch.OutOfMemoryError."""
        if self._parked is not None:
            self._parked.bring_back()
            self._parked = None

    def clear(self) -> None:
        self.held = self._parked = None
