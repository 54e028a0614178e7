"""A job from request to result, on one rank.

The transformer is cut over all ranks by the job's mesh. The VAE is whole on each rank, and all of them share its work
on a video, whatever the mesh.

Order inside a job: have the model, prepare alone, vote, run together. Whatever can fail on one rank only happens
before a vote, so that no rank waits in a collective for one that is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import assert_never

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import (
    DecodeRequest,
    EncodeRequest,
    JobRequest,
    SampleRequest,
    VAESpec,
)
from comfy_wan_dist.mesh.degrees import MeshDegrees, parse_mesh
from comfy_wan_dist.mesh.layout import job_ranks
from comfy_wan_dist.mesh.vae_memory import (
    Direction,
    VAEMemory,
    choose_split_within,
    refuse_memory,
)
from comfy_wan_dist.mesh.vae_split import LatentSize, VAESplit
from workers.checkpoint.files import ModelFiles
from workers.checkpoint.sharing import build_read_groups
from workers.checkpoint.vae import build_vae, load_vae_weights, vae_bytes
from workers.job import (
    Job,
    JobStats,
    Runner,
    load_milestone,
    memory_errors,
    stop_if_asked,
    together,
)
from workers.model.dtypes import dtype_named
from workers.model.wan import WanModel
from workers.parallel.compile import outside_graphs
from workers.parallel.groups import MeshGroups, PlaneGroups
from workers.parallel.vae.share import apply_vae_split
from workers.resident.memory import UNLIMITED, Room, peak_memory, reset_peak_memory
from workers.resident.transformers import Transformers
from workers.sampling.run import prepare_sample, run_sample
from workers.vae.run import (
    VAEShare,
    decode_chunks_into,
    encode_chunks_into,
    latent_size,
    validate_decode,
    validate_encode,
)
from workers.vae.wan22 import WanVAE

logger = logging.getLogger(__name__)


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
    """Runs requests on this rank's part of the plane, and keeps transformers and one VAE between them."""

    def __init__(
        self, *, plane: PlaneGroups, local_ranks: int, device: torch.device, files: ModelFiles
    ) -> None:
        """local_ranks: how many of the plane's ranks are on each machine."""
        self._plane = plane
        self._local_ranks = local_ranks
        self._files = files
        self._rank = plane.rank
        self._device = device
        self._room = Room(device=device, local_ranks=local_ranks)
        self._transformers = Transformers(
            plane=plane,
            local_ranks=local_ranks,
            files=files,
            room=self._room,
            drop_vae=self._drop_vae,
        )
        self._vae: HeldVAE | None = None
        self._bytes_read = 0
        self._note = ""

    def run(self, request: JobRequest, job: Job) -> JobStats:
        self._bytes_read, self._note = 0, ""
        self._transformers.bytes_read = 0
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
            bytes_read=self._bytes_read + self._transformers.bytes_read,
            ledger=self._plane.ledger.lines(),
            peak_bytes=peak_memory(self._device),
            note=self._note,
        )

    def unload(self) -> None:
        self._transformers.clear()
        self._drop_vae()

    def _sample(self, request: SampleRequest, job: Job) -> None:
        groups = self._groups_for(request, job)
        loaded, take_turns = self._transformers.have(request, groups, job)
        model = loaded.model
        run = together(
            job,
            lambda: prepare_sample(
                request, model, tensor=job.tensor, groups=groups, device=self._device
            ),
        )
        self._transformers.let_idle_go(request, model.shape, groups, job)
        loaded.fit_to(run.shards, groups)

        def switch() -> WanModel:
            low = self._transformers.switch_to_low_noise(take_turns=take_turns, job=job)
            low.fit_to(run.shards, groups)
            return low.model

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
        if is_short and (budget is None or free_bytes < budget) and self._transformers.offload(job):
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
        return self._room.spare()

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

    def _have_vae(self, spec: VAESpec, job: Job) -> WanVAE:
        """The VAE `spec` names, whole on every rank, loaded if it is not the one at hand."""
        if self._vae is not None and self._vae.spec == spec:
            return self._vae.vae
        self._drop_vae()
        dtype = dtype_named(spec.dtype)

        def spare_memory() -> int:
            return self._room.usable() - vae_bytes(self._files.read(spec).path, dtype=dtype)

        if job.agree_least(together(job, spare_memory)) < 0:
            self._transformers.offload(job)
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

    def _drop_vae(self) -> None:
        self._vae = None
        self._room.release()
