"""The transformers that a rank holds between jobs: which are loaded, with which LoRAs, and where their weights are.

Of two experts it keeps both. Else it keeps the latest model, and the one before where the low-noise expert would be,
idle, until the memory is wanted. All ranks of a plane do the same jobs, so they hold the same models and let go of the
same ones; whatever depends on a rank's memory is voted on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.memory import rank_memory, weight_bytes
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.workload import Workload
from comfy_wan_dist.model_file.wan import validate_experts
from workers.checkpoint.files import ModelFiles
from workers.job import Job, load_milestone, together
from workers.parallel.groups import MeshGroups, PlaneGroups
from workers.parallel.parallelize import ParallelModel

from .fit import margin_for_both, validate_host_memory
from .loading import ModelLoader
from .memory import UNLIMITED, Room
from .ropes import RopeTables
from .slot import ModelSlot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedModels:
    """What a job asks of the transformers. workload: the job with a model of a shape; raises ConfigError."""

    model: ModelSpec
    low_noise: ModelSpec | None
    workload: Callable[[WanShape], Workload]


class Transformers:
    """Those of one rank. bytes_read: what was asked of files since it was last set to 0."""

    def __init__(
        self,
        *,
        plane: PlaneGroups,
        files: ModelFiles,
        room: Room,
        drop_vae: Callable[[], None],
    ) -> None:
        """drop_vae: gives up the VAE's memory."""
        self.model = ModelSlot()
        self.low_noise = ModelSlot()
        self.bytes_read = 0
        self._plane = plane
        self._loader = ModelLoader(plane=plane, files=files, room=room)
        self._room = room
        self._drop_vae = drop_vae

    def ready(self, spec: ModelSpec) -> ParallelModel | None:
        """What `have` gives where it has nothing to do on this rank, else None. No collectives."""
        slots, held = (self.model, self.low_noise), self.model.held
        if held is None or any(slot.is_outdated_by(spec) for slot in slots):
            return None
        return held.loaded if self.model.holds(spec) and not self.model.is_offloaded else None

    def have(
        self, wanted: WantedModels, groups: MeshGroups, job: Job
    ) -> tuple[ParallelModel, bool]:
        """The job's transformer, and whether it and the low-noise expert take turns on the device.

        If they do, that one is offloaded, else it is on the device as well.
        """
        high, low = wanted.model, wanted.low_noise
        if not self.model.holds_base(high) and (
            self.low_noise.holds_base(high) or (low is not None and self.model.holds_base(low))
        ):
            self.model, self.low_noise = self.low_noise, self.model
        if low is None:
            for slot in (self.model, self.low_noise):
                if slot.is_outdated_by(high):
                    slot.clear()
            held = self.model.held
            if held is not None and self.model.holds(high):
                is_there = job.agree_least(int(not self.model.is_offloaded))
                if is_there:  # as for most jobs: no rank has anything to move
                    return held.loaded, False
            if held is None or self.model.holds_base(high):
                together(job, self._make_room)
                return self._have_model(high, self.model, groups, job, idle=self.low_noise), False
            # In place of the one before; a load that fails costs no other.
            loaded = self._have_model(high, self.low_noise, groups, job, idle=self.model)
            self.model, self.low_noise = self.low_noise, self.model
            return loaded, False
        # What neither slot needs goes before anything is loaded.
        for slot, spec in ((self.model, high), (self.low_noise, low)):
            if slot.held is not None and not slot.holds_base(spec):
                slot.clear()
                self._room.release()
        loads = [self.model.holds(high), self.low_noise.holds(low)].count(False)
        last = loads - 1
        if not self._take_turns(wanted, low, groups, job):
            loaded = self._have_model(high, self.model, groups, job, turns=loads)
            self._have_model(low, self.low_noise, groups, job, turn=last, turns=loads)
            return loaded, False
        if not self.low_noise.holds(low):
            together(job, self.model.offload)
            self._have_model(low, self.low_noise, groups, job, turns=loads)
        together(job, self.low_noise.offload)
        return self._have_model(high, self.model, groups, job, turn=last, turns=loads), True

    def switch_to_low_noise(self, *, take_turns: bool, job: Job) -> ParallelModel:
        """The low-noise expert, after `have`. Collectives: votes, if the two take turns."""
        if take_turns:
            together(job, self.model.offload)
            self._bring_back(self.low_noise, job)
        assert self.low_noise.held is not None, "it was loaded before the first step"
        return self.low_noise.held.loaded

    def let_idle_go(
        self, wanted: WantedModels, shape: WanShape, groups: MeshGroups, job: Job
    ) -> None:
        """Offload or clear what the job does not use, if it would be short of memory else. Collectives: votes."""

        def spare() -> int:
            memory = rank_memory(wanted.workload(shape), groups.degrees, groups.rank)
            return self._room.spare() - (memory.total - memory.weights)

        if wanted.low_noise is None:
            self._let_go(self.low_noise, spare, job, to_host=True)

    def offload(self, job: Job) -> bool:
        """Move the transformers' weights to host memory, or let go of the second where that has no room for both.

        False where that gains nothing. Collectives: votes.
        """
        slots = (self.model, self.low_noise)
        weights = sum(slot.device_bytes() for slot in slots)
        if job.agree_least(-weights) == 0:
            return False
        if not self._room.has_host:
            return self._let_go(self.low_noise, lambda: -1, job)

        def spare_host_memory() -> int:
            return self._room.spare_on_host() - sum(slot.device_bytes() for slot in slots)

        self._let_go(self.low_noise, spare_host_memory, job)
        if job.agree_least(together(job, spare_host_memory)) < 0:
            return False

        def offload() -> None:
            for slot in slots:
                slot.offload()

        together(job, offload)
        if self._plane.rank == 0:
            logger.info("the transformer's weights moved to host memory, to make room for the VAE")
        return True

    def _let_go(
        self, slot: ModelSlot, spare: Callable[[], int], job: Job, *, to_host: bool = False
    ) -> bool:
        """Clear `slot` if `spare` is negative on any rank where it has weights on the device.

        to_host: offload it instead where host memory has room, for models that take turns from job to job.
        Collectives: votes, if it has a model. Where offloading failed, only some ranks have it on the device.
        """
        if slot.held is None:
            return False
        number = together(job, lambda: UNLIMITED if slot.is_offloaded else spare())
        if job.agree_least(number) >= 0:
            return False
        if to_host and self._room.has_host:
            room = together(job, lambda: self._room.spare_on_host() - slot.device_bytes())
            if job.agree_least(room) >= 0:
                together(job, slot.offload)
                return True
        slot.clear()
        self._room.release()
        return True

    def _bring_back(self, slot: ModelSlot, job: Job) -> None:
        """Undo `offload`. Where the VAE has taken the room since, it goes. Collectives: votes."""

        def spare_memory() -> int:
            return self._room.usable() - away if (away := slot.offloaded_bytes) else UNLIMITED

        if job.agree_least(together(job, spare_memory)) < 0:
            self._drop_vae()
        together(job, slot.bring_back)

    def _make_room(self) -> None:
        """Offload the low-noise expert where the other one has made room for it."""
        if self.model.is_offloaded:
            self.low_noise.offload()

    def _take_turns(
        self, wanted: WantedModels, low: ModelSpec, groups: MeshGroups, job: Job
    ) -> bool:
        """Whether the two experts do not fit on the device together. Collectives: votes. Raises ConfigError."""

        def workloads() -> Sequence[Workload]:
            if self.model.holds(wanted.model) and self.low_noise.holds(low):
                held = (self.model.held, self.low_noise.held)
                shapes = [each.loaded.model.shape for each in held if each is not None]
            else:
                known = [
                    self._loader.recognise(spec, groups.degrees) for spec in (wanted.model, low)
                ]
                validate_experts(*(found.file for found in known))
                shapes = [found.shape for found in known]
            return [wanted.workload(shape) for shape in shapes]

        of_both = together(job, workloads)
        if not self._room.has_host:
            return False
        there = self.model.device_bytes() + self.low_noise.device_bytes()
        margin = together(
            job, lambda: margin_for_both(of_both, groups, room=self._room, weights_there=there)
        )
        if job.agree_least(margin) >= 0:
            return False
        weights = sum(
            weight_bytes(each.shape, groups.degrees, stage=groups.pp.rank, dtype=each.dtype)
            for each in of_both
        )
        if self.model.held is None or self.low_noise.held is None:  # else one of them waits there
            together(job, lambda: validate_host_memory(weights, self._room))
        return True

    def _have_model(
        self,
        spec: ModelSpec,
        slot: ModelSlot,
        groups: MeshGroups,
        job: Job,
        idle: ModelSlot | None = None,
        turn: int = 0,
        turns: int = 1,
    ) -> ParallelModel:
        """The transformer `spec` names, loaded if it is not the slot's.

        If it differs in its LoRAs only, no more is read than what they change. What is `idle` goes where both do not
        fit. turn, turns: of the job's loads.
        """
        if slot.held is not None and slot.holds(spec):
            self._bring_back(slot, job)
            return slot.held.loaded
        found = together(job, lambda: self._loader.recognise(spec, groups.degrees))
        report = load_milestone(job, turn=turn, turns=turns)
        if slot.held is not None and slot.differs_in_loras(spec, found.shape):
            self._bring_back(slot, job)
            # The slot is empty meanwhile: a model that is changed in part must not be found there.
            held, slot.held = slot.held, None
            slot.held, bytes_read = self._loader.change_loras(held, found, groups, report, job)
        else:
            slot.clear()
            self._room.release()
            if idle is not None:

                def spare() -> int:
                    return 0 if self._loader.fits(found, groups) else -1

                self._let_go(idle, spare, job, to_host=True)
            slot.held, bytes_read = self._loader.load(found, groups, report, job)
        self.bytes_read += bytes_read
        return slot.held.loaded


@dataclass(frozen=True, kw_only=True)
class TransformerWork:
    """What one rank does its plane's requests for a transformer with.

    is_one_machine: every rank of the plane sees a request's result.
    """

    plane: PlaneGroups
    transformers: Transformers
    device: torch.device
    is_one_machine: bool
    ropes: RopeTables = field(default_factory=RopeTables)
