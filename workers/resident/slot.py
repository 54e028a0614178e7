"""A transformer as one rank holds it between jobs: on its device, or offloaded to host memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.shape import WanShape
from workers.checkpoint.lora import Changes
from workers.parallel.parallelize import ParallelModel

from .offloaded import OffloadedWeights, weight_bytes
from .prompts import EncodedPrompts


@dataclass(frozen=True, kw_only=True)
class HeldModel:
    """changes: what LoRAs have made of the file's weights."""

    spec: ModelSpec
    loaded: ParallelModel
    changes: Changes
    prompts: EncodedPrompts = field(default_factory=EncodedPrompts)


class ModelSlot:
    """Room for one transformer. Its weights are on the device, or in host memory for a while."""

    def __init__(self) -> None:
        self.held: HeldModel | None = None
        self._offloaded: OffloadedWeights | None = None

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
    def is_offloaded(self) -> bool:
        return self._offloaded is not None

    @property
    def offloaded_bytes(self) -> int:
        """What `bring_back` needs room for."""
        return 0 if self._offloaded is None else self._offloaded.bytes

    def device_bytes(self) -> int:
        """Bytes of its weights that are on the device."""
        return 0 if self.held is None else weight_bytes(self.held.loaded.model)

    def offload(self) -> None:
        """Move the weights to host memory, if there are any on the device. Raises torch.OutOfMemoryError."""
        if self.held is not None and self._offloaded is None:
            self.held.prompts.clear()
            self._offloaded = OffloadedWeights(self.held.loaded.model)

    def bring_back(self) -> None:
        """Undo `offload`. Raises torch.OutOfMemoryError."""
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None

    def clear(self) -> None:
        self.held = self._offloaded = None
