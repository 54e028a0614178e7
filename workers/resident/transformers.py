"""The transformers that a rank holds between jobs: which are loaded, with which LoRAs, and where their weights are.

Of two experts it keeps both. Else it keeps the latest model, and the one before where the low-noise expert would be,
idle, until the memory is wanted. All ranks of a plane do the same jobs, so they hold the same models and let go of the
same ones; whatever depends on a rank's memory is voted on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from comfy_wan_dist.ipc.errors import ConfigError, InsufficientMemoryError
from comfy_wan_dist.ipc.messages import ModelSpec, SampleRequest
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.memory import weight_bytes
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.validate import validate_model
from comfy_wan_dist.model_file.lora import changed_shape
from comfy_wan_dist.model_file.wan import WanFile, read_wan_file, validate_experts
from workers.checkpoint.files import ModelFiles, Spec
from workers.checkpoint.load import build_model, load_weights
from workers.checkpoint.lora import Changes, changed_parameters, merge_changes, read_changes
from workers.checkpoint.part import own_parts
from workers.checkpoint.sharing import Milestone, build_read_groups
from workers.job import Job, load_milestone, together
from workers.model.wan import WanModel
from workers.parallel.groups import MeshGroups, PlaneGroups
from workers.sampling.forward import validate_latent

from .fit import margin_for_both, planned_memory, validate_host_memory
from .free_memory import UNLIMITED, validate_memory
from .memory import CAUTION, Room
from .slot import HeldModel, LoadedModel, ModelSlot, finish_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

logger = logging.getLogger(__name__)


class Transformers:
    """Of one rank. bytes_read: what was asked of files since it was last set to 0."""

    def __init__(
        self,
        *,
        plane: PlaneGroups,
        local_ranks: int,
        files: ModelFiles,
        room: Room,
        drop_vae: Callable[[], None],
    ) -> None:
        """local_ranks: how many of the plane's ranks are on each machine. drop_vae: gives up the VAE's memory."""
        self.model = ModelSlot()
        self.low_noise = ModelSlot()
        self.bytes_read = 0
        self._plane = plane
        self._local_ranks = local_ranks
        self._files = files
        self._room = room
        self._drop_vae = drop_vae

    def clear(self) -> None:
        self.model.clear()
        self.low_noise.clear()

    def have(
        self, request: SampleRequest, groups: MeshGroups, job: Job
    ) -> tuple[LoadedModel, bool]:
        """The job's transformer, and whether it and the low-noise expert take turns on the device.

        If they do, that one is parked, else it is on the device as well.
        """
        high, low = request.model, request.low_noise
        if not self.model.holds_base(high) and (
            self.low_noise.holds_base(high)
            or (low is not None and self.model.holds_base(low.model))
        ):
            self.model, self.low_noise = self.low_noise, self.model
        if low is None:
            for slot in (self.model, self.low_noise):
                if slot.is_outdated_by(high):
                    slot.clear()
            if self.model.held is None or self.model.holds_base(high):
                together(job, self._make_room)
                return self._have_model(high, self.model, groups, job, idle=self.low_noise), False
            # In place of the one before; a load that fails costs no other.
            loaded = self._have_model(high, self.low_noise, groups, job, idle=self.model)
            self.model, self.low_noise = self.low_noise, self.model
            return loaded, False
        # What neither slot needs goes before anything is loaded.
        for slot, spec in ((self.model, high), (self.low_noise, low.model)):
            if slot.held is not None and not slot.holds_base(spec):
                slot.clear()
                self._room.release()
        loads = [self.model.holds(high), self.low_noise.holds(low.model)].count(False)
        last = loads - 1
        if not self._take_turns(request, low.model, groups, job):
            loaded = self._have_model(high, self.model, groups, job, turns=loads)
            self._have_model(low.model, self.low_noise, groups, job, turn=last, turns=loads)
            return loaded, False
        if not self.low_noise.holds(low.model):
            together(job, self.model.park)
            self._have_model(low.model, self.low_noise, groups, job, turns=loads)
        together(job, self.low_noise.park)
        return self._have_model(high, self.model, groups, job, turn=last, turns=loads), True

    def switch_to_low_noise(self, *, take_turns: bool, job: Job) -> LoadedModel:
        """The low-noise expert, after `have`. Collectives: votes, if the two take turns."""
        if take_turns:
            together(job, self.model.park)
            self._bring_back(self.low_noise, job)
        assert self.low_noise.held is not None, "it was loaded before the first step"
        return self.low_noise.held.loaded

    def let_idle_go(
        self, request: SampleRequest, shape: WanShape, groups: MeshGroups, job: Job
    ) -> None:
        """Clear what the job does not use, if it would be short of memory else. Collectives: votes."""
        if request.low_noise is None:
            memory = planned_memory(request, shape, groups)
            need = memory.total - memory.weights
            self._let_go(self.low_noise, lambda: self._room.spare() - need, job)

    def park(self, job: Job) -> bool:
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

        def park() -> None:
            for slot in slots:
                slot.park()

        together(job, park)
        if self._plane.rank == 0:
            logger.info("the transformer's weights moved to host memory, to make room for the VAE")
        return True

    def _let_go(self, slot: ModelSlot, spare: Callable[[], int], job: Job) -> bool:
        """Clear `slot` if `spare` is negative on any rank where it has weights on the device.

        Collectives: two votes, if it has a model. Where parking failed, only some ranks have it on the device.
        """
        if slot.held is None:
            return False
        number = together(job, lambda: UNLIMITED if slot.is_parked else spare())
        is_wanted = job.agree_least(number) < 0
        if is_wanted:
            slot.clear()
            self._room.release()
        return is_wanted

    def _bring_back(self, slot: ModelSlot, job: Job) -> None:
        """Undo `_park_model`. Where the VAE has taken the room since, it goes. Collectives: votes."""

        def spare_memory() -> int:
            return self._room.usable() - parked if (parked := slot.parked_bytes) else UNLIMITED

        if job.agree_least(together(job, spare_memory)) < 0:
            self._drop_vae()
        together(job, slot.bring_back)

    def _make_room(self) -> None:
        """Park the low-noise expert where the other one has made room for it."""
        if self.model.is_parked:
            self.low_noise.park()

    def _take_turns(
        self, request: SampleRequest, low: ModelSpec, groups: MeshGroups, job: Job
    ) -> bool:
        """Whether the two experts do not fit on the device together. Collectives: votes. Raises ConfigError."""

        def shapes() -> Sequence[WanShape]:
            if self.model.holds(request.model) and self.low_noise.holds(low):
                held = (self.model.held, self.low_noise.held)
                shapes = [each.loaded.model.shape for each in held if each is not None]
            else:
                known = [self._recognise(spec, groups.degrees) for spec in (request.model, low)]
                validate_experts(*(file for file, _ in known))
                shapes = [changed_shape(file.shape, changes) for file, changes in known]
            validate_latent(job.tensor(request.noisy), shapes[0])
            return shapes

        of_both = together(job, shapes)
        if not self._room.has_host:
            return False
        there = self.model.device_bytes() + self.low_noise.device_bytes()
        margin = together(
            job,
            lambda: margin_for_both(
                request, of_both, groups, device=self._room.device, weights_there=there
            ),
        )
        if job.agree_least(margin) >= 0:
            return False
        weights = sum(
            weight_bytes(shape, groups.degrees, stage=groups.pp.rank, dtype=request.model.dtype)
            for shape in of_both
        )
        if self.model.held is None or self.low_noise.held is None:  # else one of them waits there
            together(
                job,
                lambda: validate_host_memory(
                    weights, local_ranks=self._local_ranks, caution=CAUTION
                ),
            )
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
    ) -> LoadedModel:
        """The transformer `spec` names, loaded if it is not the slot's.

        If it differs in its LoRAs only, no more is read than what they change. What is `idle` goes where both do not
        fit. turn, turns: of the job's loads.
        """
        if slot.held is not None and slot.held.spec == spec:
            self._bring_back(slot, job)
            return slot.held.loaded
        file, changes = together(job, lambda: self._recognise(spec, groups.degrees))
        shape = changed_shape(file.shape, changes)

        sharing = build_read_groups(self._plane, local_ranks=self._local_ranks)
        report = load_milestone(job, turn=turn, turns=turns)

        def merge(model: WanModel, names: frozenset[str], milestone: Milestone) -> int:
            bytes_read = merge_changes(
                model,
                file,
                changes,
                names=names,
                tp=groups.tp,
                fsdp=groups.fsdp,
                sharing=sharing,
                milestone=milestone,
            )
            specs: tuple[Spec, ...] = (spec, *spec.loras)
            for each in specs:
                self._files.read(each)  # still the same
            return bytes_read

        if slot.held is not None and slot.differs_in_loras(spec, shape):
            self._bring_back(slot, job)
            held, slot.held = slot.held, None  # half changed it is none
            names = changed_parameters(held.changes, changes)
            self.bytes_read += together(job, lambda: merge(held.loaded.model, names, report))
            slot.held = HeldModel(spec=spec, loaded=held.loaded, changes=changes)
            return held.loaded
        slot.clear()
        self._room.release()
        tp, fsdp, dtype = groups.tp, groups.fsdp, DTYPES[spec.dtype]

        def validate() -> None:
            validate_memory(
                shape,
                groups.degrees,
                stage=groups.pp.rank,
                dtype=spec.dtype,
                local_ranks=self._local_ranks,
                device=self._room.device,
                free_bytes=self._room.free(),
            )

        def spare() -> int:
            try:
                validate()
            except InsufficientMemoryError:
                return -1
            return 0

        if idle is not None:
            self._let_go(idle, spare, job)

        def allocate() -> WanModel:
            validate()
            return build_model(
                shape, pp=groups.pp, tp=tp, fsdp=fsdp, dtype=dtype, device=self._room.device
            )

        model = together(job, allocate)

        def load() -> int:
            names = frozenset(changes)
            parts = own_parts(model, file, tp=tp, fsdp=fsdp)
            whole = sum(part.file_bytes for part in parts)

            def merging(done: int, total: int, error: Exception | None) -> None:
                report(whole - total + done, whole, error)

            bytes_read = load_weights(
                model,
                file,
                tp=tp,
                fsdp=fsdp,
                sharing=sharing,
                milestone=lambda done, _, error: report(done, whole, error),
                leave_out=names,
            )
            return bytes_read + merge(model, names, merging)

        self.bytes_read += together(job, load)
        if spec.compile:
            together(job, lambda: require_compiler(self._room.device))
        loaded = finish_model(model, groups, compile_backend="inductor" if spec.compile else None)
        slot.held = HeldModel(spec=spec, loaded=loaded, changes=changes)
        return loaded

    def _recognise(self, spec: ModelSpec, degrees: MeshDegrees) -> tuple[WanFile, Changes]:
        if spec.dtype not in DTYPES:
            raise ConfigError(f"dtype {spec.dtype!r} is not known; use {', '.join(DTYPES)}")
        file = read_wan_file(self._files.read(spec))
        validate_model(degrees, file.shape)
        return file, read_changes(spec.loras, self._files, file.shape)


def require_compiler(device: torch.device) -> None:
    """Compile something small. Raises ConfigError where torch.compile does not work."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:
        raise ConfigError(
            f"torch.compile does not work here ({str(error).strip().splitlines()[0][:200]}); "
            "install a C++ compiler or switch compile off"
        ) from error
