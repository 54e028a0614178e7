"""A job from request to result, on one rank.

The transformer is cut over all ranks by the job's mesh. The VAE is whole on each rank, and all of them share its work
on a video, whatever the mesh.

Order inside a job: have the model, prepare alone, vote, run together. Whatever can fail on one rank only happens
before a vote, so that no rank waits in a collective for one that is gone.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from typing_extensions import assert_never

from comfy_wan_dist.ipc.errors import (
    ConfigError,
    InsufficientMemoryError,
    JobCancelled,
)
from comfy_wan_dist.ipc.messages import (
    DecodeRequest,
    EncodeRequest,
    JobRequest,
    ModelSpec,
    SampleRequest,
    VAESpec,
)
from comfy_wan_dist.mesh.degrees import MeshDegrees, parse_mesh
from comfy_wan_dist.mesh.layout import job_ranks
from comfy_wan_dist.mesh.memory import weight_bytes
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.vae_memory import (
    Direction,
    VAEMemory,
    choose_split_within,
    refuse_memory,
)
from comfy_wan_dist.mesh.vae_split import LatentSize, VAESplit
from comfy_wan_dist.mesh.validate import validate_model
from comfy_wan_dist.model_file.lora import changed_shape
from comfy_wan_dist.model_file.wan import WanFile, read_wan_file, validate_experts

from .checkpoint.files import ModelFiles, Spec
from .checkpoint.load import build_model, load_weights
from .checkpoint.lora import Changes, changed_parameters, merge_changes, read_changes
from .checkpoint.memory import (
    UNLIMITED,
    free_memory,
    has_own_memory,
    usable_memory,
    validate_memory,
)
from .checkpoint.sharing import Milestone, build_read_groups
from .checkpoint.vae import build_vae, load_vae_weights, vae_bytes
from .experts import margin_for_both, planned_memory, validate_host_memory
from .loaded import HeldModel, LoadedModel, ModelSlot, finish_model
from .loop import Job, JobStats, Runner
from .model.wan import WanModel
from .parallel.compile import outside_graphs
from .parallel.groups import MeshGroups, PlaneGroups
from .parallel.vae_share import apply_vae_split
from .peak_memory import peak_memory, reset_peak_memory
from .sampling.run import prepare_sample, run_sample, validate_latent
from .vae.run import (
    VAEShare,
    decode_chunks_into,
    encode_chunks_into,
    latent_size,
    validate_decode,
    validate_encode,
)
from .vae.wan22 import WanVAE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CAUTION = 0.9
"""Of the free memory that the VAE may plan with: it takes somewhat more than planned."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


def build_runner(
    *, degrees: MeshDegrees, rank: int, local_ranks: int, device: torch.device, files: ModelFiles
) -> Runner:
    """The runner of one rank of a plane that was started for the mesh `degrees`."""
    plane = PlaneGroups(layout=degrees, rank=rank)
    return PlaneRunner(plane=plane, local_ranks=local_ranks, device=device, files=files)


@dataclass(frozen=True, kw_only=True)
class HeldVAE:
    spec: VAESpec
    vae: WanVAE


class PlaneRunner:
    """Runs requests on this rank's part of the plane, and keeps transformers and one VAE between them.

    Of two experts it keeps both. Else it keeps the latest model, and the one before where the low-noise expert would
    be, idle, until the memory is wanted.
    """

    def __init__(
        self, *, plane: PlaneGroups, local_ranks: int, device: torch.device, files: ModelFiles
    ) -> None:
        """local_ranks: how many of the plane's ranks are on each machine."""
        self._plane = plane
        self._local_ranks = local_ranks
        self._files = files
        self._rank = plane.rank
        self._device = device
        self._model = ModelSlot()
        self._low_noise = ModelSlot()
        self._vae: HeldVAE | None = None
        self._bytes_read = 0
        self._note = ""

    def run(self, request: JobRequest, job: Job) -> JobStats:
        self._bytes_read, self._note = 0, ""
        self._plane.ledger.clear()
        reset_peak_memory(self._device)
        with torch.inference_mode():
            match request:
                case SampleRequest():
                    self._sample(request, job)
                case DecodeRequest():
                    self._decode(request, job)
                case EncodeRequest():
                    self._encode(request, job)
                case _:
                    assert_never(request)
        return JobStats(
            bytes_read=self._bytes_read,
            ledger=self._plane.ledger.lines(),
            peak_bytes=peak_memory(self._device),
            note=self._note,
        )

    def unload(self) -> None:
        self._model.clear()
        self._low_noise.clear()
        self._vae = None
        self._release_memory()

    def _sample(self, request: SampleRequest, job: Job) -> None:
        groups = self._groups_for(request, job)
        loaded, take_turns = self._have_models(request, groups, job)
        model = loaded.model
        run = together(
            job,
            lambda: prepare_sample(
                request, model, tensor=job.tensor, groups=groups, device=self._device
            ),
        )
        if request.low_noise is None:
            memory = planned_memory(request, model.shape, groups)
            need = memory.total - memory.weights
            self._let_go(self._low_noise, lambda: self._spare_memory() - need, job)
        loaded.fit_to(run.shards, groups)

        def switch() -> WanModel:
            low = self._low_noise
            if take_turns:
                together(job, self._model.park)
                self._bring_back(low, job)
            assert low.held is not None, "it was loaded before the first step"
            low.held.loaded.fit_to(run.shards, groups)
            return low.held.loaded.model

        steps = len(request.timesteps)

        def before_step(index: int) -> None:
            if index:
                job.report("sample", index, steps)
            stop_if_asked(job)

        latent = run_sample(
            run, request, model, groups=groups, before_step=before_step, switch=switch
        )

        def write_result() -> None:
            if not bool(torch.isfinite(latent).all()):
                raise ConfigError(
                    "the model produced NaN or infinite values; use the dtype bfloat16 or float32, "
                    "or check that the checkpoint is whole"
                )
            if groups.rank == 0:
                job.tensor(request.result).copy_(latent)

        together(job, write_result)
        job.report("sample", steps, steps)

    def _decode(self, request: DecodeRequest, job: Job) -> None:
        vae = self._have_vae(request.vae, job)
        latent, result = job.tensor(request.latent), job.tensor(request.result)
        together(job, lambda: validate_decode(vae.config, latent, result))
        memory = VAEMemory(
            direction=Direction.DECODE, dim=vae.config.decoder_dim, item_bytes=vae.dtype.itemsize
        )
        split = self._choose_split(latent_size(latent), memory, request.memory_bytes, job)
        share = self._share_vae(vae, split)
        chunks = decode_chunks_into(vae, latent, result, share=share, device=self._device)
        self._advance("decode", chunks, latent.shape[0] * latent.shape[2], job)

    def _encode(self, request: EncodeRequest, job: Job) -> None:
        vae = self._have_vae(request.vae, job)
        frames, result = job.tensor(request.frames), job.tensor(request.result)
        together(job, lambda: validate_encode(vae.config, frames, result))
        memory = VAEMemory(
            direction=Direction.ENCODE, dim=vae.config.encoder_dim, item_bytes=vae.dtype.itemsize
        )
        split = self._choose_split(latent_size(result), memory, request.memory_bytes, job)
        share = self._share_vae(vae, split)
        chunks = encode_chunks_into(vae, frames, result, share=share, device=self._device)
        self._advance("encode", chunks, result.shape[2], job)

    def _choose_split(
        self, size: LatentSize, memory: VAEMemory, budget: int | None, job: Job
    ) -> VAESplit:
        """The split of a video that keeps to `budget` and to what every rank has free.

        The transformer's weights go to host memory where that spares tiles. Collectives: votes. Raises ConfigError,
        InsufficientMemoryError.
        """

        def choose(free_bytes: int) -> VAESplit | None:
            return choose_split_within(
                size,
                ranks=self._local_ranks,
                need=memory.bytes,
                limit=free_bytes if budget is None else min(budget, free_bytes),
            )

        free_bytes = job.agree_least(together(job, self._free_for_vae))
        split = choose(free_bytes)
        is_short = split is None or split.tiles > 1
        if is_short and (budget is None or free_bytes < budget) and self._park_model(job):
            free_bytes = job.agree_least(together(job, self._free_for_vae))
            split = choose(free_bytes)
        if split is None:
            raise refuse_memory(
                size,
                ranks=self._local_ranks,
                memory=memory,
                budget=budget,
                free_bytes=free_bytes,
            )
        return split

    def _free_for_vae(self) -> int:
        if self._rank >= self._local_ranks:
            return UNLIMITED  # of another machine, whose ranks have no part
        return self._spare_memory()

    def _spare_memory(self) -> int:
        """What this rank may plan with of its device's free memory."""
        return int(CAUTION * self._usable())

    def _usable(self) -> int:
        """Free bytes for this rank."""
        free_bytes = usable_memory(self._device)
        return free_bytes // self._local_ranks if self._device.type == "cpu" else free_bytes

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
            self._release_memory()
        return is_wanted

    def _park_model(self, job: Job) -> bool:
        """Move the transformers' weights to host memory, or let go of the second where that has no room for both.

        False where that gains nothing. Collectives: votes.
        """
        slots = (self._model, self._low_noise)
        weights = sum(slot.device_bytes() for slot in slots)
        if job.agree_least(-weights) == 0:
            return False
        if not has_own_memory(self._device):
            return self._let_go(self._low_noise, lambda: -1, job)

        def spare_host_memory() -> int:
            host = torch.device("cpu")
            wanted = sum(slot.device_bytes() for slot in slots)
            return int(CAUTION * free_memory(host)) // self._local_ranks - wanted

        self._let_go(self._low_noise, spare_host_memory, job)
        if job.agree_least(together(job, spare_host_memory)) < 0:
            return False

        def park() -> None:
            for slot in slots:
                slot.park()

        together(job, park)
        if self._rank == 0:
            logger.info("the transformer's weights moved to host memory, to make room for the VAE")
        return True

    def _bring_back(self, slot: ModelSlot, job: Job) -> None:
        """Undo `_park_model`. Where the VAE has taken the room since, it goes. Collectives: votes."""

        def spare_memory() -> int:
            return self._usable() - parked if (parked := slot.parked_bytes) else UNLIMITED

        if job.agree_least(together(job, spare_memory)) < 0:
            self._vae = None
            self._release_memory()
        together(job, slot.bring_back)

    def _share_vae(self, vae: WanVAE, split: VAESplit) -> VAEShare:
        """This rank's share of a video. Collectives: the making of new groups.

        Only ranks of ComfyUI's machine have one: the result is in its memory, and they come first.
        """
        self._note = split.explain(self._local_ranks)
        if self._rank == 0:
            logger.info("VAE: %s", self._note)
        return apply_vae_split(vae, split, self._plane)

    def _advance(self, phase: str, chunks: Iterator[int], total: int, job: Job) -> None:
        """Work through `chunks`, on all ranks side by side, until they have done `total` frames.

        Collectives: one vote before each chunk, and those of the chunk.
        """
        done = reported = 0
        while done < total:
            if done > reported:
                job.report(phase, done, total)
                reported = done
            stop_if_asked(job)
            with memory_errors():
                done = next(chunks)
        job.report(phase, total, total)

    def _groups_for(self, request: SampleRequest, job: Job) -> MeshGroups:
        """Groups of the job's mesh. Collectives: a vote, and the making of groups that no earlier job needed."""

        def check() -> MeshDegrees:
            degrees = parse_mesh(request.mesh)
            if degrees is None:
                raise ConfigError("a job's mesh is auto; name one")
            job_ranks(self._plane.layout, degrees)
            return degrees

        groups = self._plane.for_mesh(together(job, check))
        return outside_graphs(groups) if request.model.compile else groups

    def _have_models(
        self, request: SampleRequest, groups: MeshGroups, job: Job
    ) -> tuple[LoadedModel, bool]:
        """The job's transformer, and whether it and the low-noise expert take turns on the device.

        If they do, that one is parked, else it is on the device as well.
        """
        high, low = request.model, request.low_noise
        if not self._model.holds_base(high) and (
            self._low_noise.holds_base(high)
            or (low is not None and self._model.holds_base(low.model))
        ):
            self._model, self._low_noise = self._low_noise, self._model
        if low is None:
            if not self._model.holds_base(high):
                self._model, self._low_noise = self._low_noise, self._model
            if self._low_noise.is_outdated_by(high):
                self._low_noise.clear()
            together(job, self._make_room)
            return self._have_model(high, self._model, groups, job, idle=self._low_noise), False
        # What neither slot needs goes before anything is loaded.
        for slot, spec in ((self._model, high), (self._low_noise, low.model)):
            if slot.held is not None and not slot.holds_base(spec):
                slot.clear()
                self._release_memory()
        if not self._take_turns(request, low.model, groups, job):
            loaded = self._have_model(high, self._model, groups, job)
            self._have_model(low.model, self._low_noise, groups, job)
            return loaded, False
        if not self._low_noise.holds(low.model):
            together(job, self._model.park)
            self._have_model(low.model, self._low_noise, groups, job)
        together(job, self._low_noise.park)
        return self._have_model(high, self._model, groups, job), True

    def _make_room(self) -> None:
        """Park the low-noise expert where the other one has made room for it."""
        if self._model.is_parked:
            self._low_noise.park()

    def _take_turns(
        self, request: SampleRequest, low: ModelSpec, groups: MeshGroups, job: Job
    ) -> bool:
        """Whether the two experts do not fit on the device together. Collectives: votes. Raises ConfigError."""

        def shape() -> WanShape:
            if self._model.held is not None and self._low_noise.held is not None:
                shape = self._model.held.loaded.model.shape
            else:
                files = [self._recognise(spec, groups.degrees)[0] for spec in (request.model, low)]
                validate_experts(*files)
                shape = files[0].shape
            validate_latent(job.tensor(request.noisy), shape)
            return shape

        of_both = together(job, shape)
        if not has_own_memory(self._device):
            return False
        there = self._model.device_bytes() + self._low_noise.device_bytes()
        margin = together(
            job,
            lambda: margin_for_both(
                request, of_both, groups, device=self._device, weights_there=there
            ),
        )
        if job.agree_least(margin) >= 0:
            return False
        weights = weight_bytes(
            of_both, groups.degrees, stage=groups.pp.rank, dtype=request.model.dtype
        )
        if self._model.held is None or self._low_noise.held is None:  # else one of them waits there
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
    ) -> LoadedModel:
        """The transformer `spec` names, loaded if it is not the slot's.

        If it differs in its LoRAs only, no more is read than what they change. What is `idle` goes where both do not
        fit.
        """
        if slot.held is not None and slot.held.spec == spec:
            self._bring_back(slot, job)
            return slot.held.loaded
        file, changes = together(job, lambda: self._recognise(spec, groups.degrees))
        shape = changed_shape(file.shape, changes)

        sharing = build_read_groups(self._plane, local_ranks=self._local_ranks)
        milestone = load_milestone(job)

        def merge(model: WanModel, names: frozenset[str]) -> int:
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
            self._bytes_read += together(job, lambda: merge(held.loaded.model, names))
            slot.held = HeldModel(spec=spec, loaded=held.loaded, changes=changes)
            return held.loaded
        slot.clear()
        self._release_memory()
        tp, fsdp, dtype = groups.tp, groups.fsdp, DTYPES[spec.dtype]

        def validate() -> None:
            validate_memory(
                shape,
                groups.degrees,
                stage=groups.pp.rank,
                dtype=spec.dtype,
                local_ranks=self._local_ranks,
                device=self._device,
                free_bytes=free_memory(self._device),
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
                shape, pp=groups.pp, tp=tp, fsdp=fsdp, dtype=dtype, device=self._device
            )

        model = together(job, allocate)

        def load() -> int:
            names = frozenset(changes)
            bytes_read = load_weights(
                model,
                file,
                tp=tp,
                fsdp=fsdp,
                sharing=sharing,
                milestone=milestone,
                leave_out=names,
            )
            return bytes_read + merge(model, names)

        self._bytes_read += together(job, load)
        if spec.compile:
            together(job, lambda: require_compiler(self._device))
        loaded = finish_model(model, groups, compile_backend="inductor" if spec.compile else None)
        slot.held = HeldModel(spec=spec, loaded=loaded, changes=changes)
        return loaded

    def _recognise(self, spec: ModelSpec, degrees: MeshDegrees) -> tuple[WanFile, Changes]:
        if spec.dtype not in DTYPES:
            raise ConfigError(f"dtype {spec.dtype!r} is not known; use {', '.join(DTYPES)}")
        file = read_wan_file(self._files.read(spec))
        validate_model(degrees, file.shape)
        return file, read_changes(spec.loras, self._files, file.shape)

    def _have_vae(self, spec: VAESpec, job: Job) -> WanVAE:
        """The VAE `spec` names, whole on every rank, loaded if it is not the one at hand."""
        if self._vae is not None and self._vae.spec == spec:
            return self._vae.vae
        self._vae = None
        self._release_memory()
        dtype = DTYPES[spec.dtype]

        def spare_memory() -> int:
            return self._usable() - vae_bytes(self._files.read(spec).path, dtype=dtype)

        if job.agree_least(together(job, spare_memory)) < 0:
            self._park_model(job)
        vae, entries = together(
            job,
            lambda: build_vae(self._files.read(spec).path, dtype=dtype, device=self._device),
        )
        sharing = build_read_groups(self._plane, local_ranks=self._local_ranks, is_whole=True)

        def load() -> int:
            bytes_read = load_vae_weights(
                vae, entries, sharing=sharing, milestone=load_milestone(job)
            )
            self._files.read(spec)  # still the same
            return bytes_read

        self._bytes_read += together(job, load)
        self._vae = HeldVAE(spec=spec, vae=vae)
        return vae

    def _release_memory(self) -> None:
        gc.collect()  # a compiled block refers to itself
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def require_compiler(device: torch.device) -> None:
    """Compile something small. Raises ConfigError where torch.compile does not work."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:
        raise ConfigError(
            f"torch.compile does not work here ({str(error).strip().splitlines()[0][:200]}); "
            "install a C++ compiler or switch compile off"
        ) from error


def together(job: Job, phase: Callable[[], T]) -> T:
    """Run a local phase, then vote: it returns on every rank or raises the same error on every rank.

    Collectives: one vote. A ConfigError on any rank is an answer, and the group lives on.
    """
    error: Exception | None = None
    try:
        with memory_errors():
            result = phase()
    except Exception as caught:  # whatever it is, the other ranks must hear of it before they go on
        error = caught
    job.agree(error)
    return result


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise a device's lack of memory as InsufficientMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as caught:
        raise InsufficientMemoryError(
            f"a device ran out of memory: {str(caught).splitlines()[0]} Use a mesh with more ranks, or a smaller video"
        ) from caught


def load_milestone(job: Job) -> Milestone:
    """Reports how far a load is. Collectives: one vote, where errors and a stop are heard on every rank."""

    def milestone(done: int, total: int, error: Exception | None) -> None:
        if error is None and job.cancel_requested():
            error = JobCancelled("the job was stopped while the model was loading")
        job.agree(error)
        if total:
            job.report("load", done, total)

    return milestone


def stop_if_asked(job: Job) -> None:
    """Raise JobCancelled on every rank once any rank has been told to stop. Collectives: one vote."""
    if job.agree_stop():
        raise JobCancelled("the job was stopped on request")
