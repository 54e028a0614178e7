"""Decoding and encoding: all ranks of ComfyUI's machine share the work on each video, whatever the mesh."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from comfy_wan_dist.ipc.messages import DecodeRequest, EncodeRequest
from comfy_wan_dist.mesh.vae_memory import (
    Direction,
    VAEMemory,
    choose_split_within,
    refuse_memory,
)
from comfy_wan_dist.mesh.vae_split import LatentSize, VAESplit

from .job import Job, memory_errors, stop_if_asked, together
from .parallel.groups import PlaneGroups
from .parallel.vae.share import apply_vae_split
from .resident.memory import UNLIMITED, Room
from .resident.transformers import Transformers
from .resident.vae import ResidentVAE
from .vae.run import (
    VAEShare,
    decode_chunks_into,
    encode_chunks_into,
    latent_size,
    validate_decode,
    validate_encode,
)
from .vae.wan22 import WanVAE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VAEWork:
    """What one rank does for the plane's decodes and encodes. transformers: make room where it is short."""

    plane: PlaneGroups
    room: Room
    vae: ResidentVAE
    transformers: Transformers

    def decode(self, request: DecodeRequest, job: Job) -> str:
        """Carry out `request` together with the other ranks; says how they shared the work."""
        vae = self.vae.have(request.vae, self.transformers, job)
        latent, result = job.tensor(request.latent), job.tensor(request.result)
        together(job, lambda: validate_decode(vae.config, latent, result))
        share, note = self._share(vae, latent_size(latent), Direction.DECODE, request, job)
        chunks = decode_chunks_into(vae, latent, result, share=share, device=self.room.device)
        advance("decode", chunks, latent.shape[0] * latent.shape[2], job)
        return note

    def encode(self, request: EncodeRequest, job: Job) -> str:
        """Carry out `request` together with the other ranks; says how they shared the work."""
        vae = self.vae.have(request.vae, self.transformers, job)
        frames, result = job.tensor(request.frames), job.tensor(request.result)
        together(job, lambda: validate_encode(vae.config, frames, result))
        share, note = self._share(vae, latent_size(result), Direction.ENCODE, request, job)
        chunks = encode_chunks_into(vae, frames, result, share=share, device=self.room.device)
        advance("encode", chunks, result.shape[2], job)
        return note

    def _share(
        self,
        vae: WanVAE,
        size: LatentSize,
        direction: Direction,
        request: DecodeRequest | EncodeRequest,
        job: Job,
    ) -> tuple[VAEShare, str]:
        """This rank's share of a video, and how the ranks share it. Collectives: votes, the making of new groups.

        Only ranks of ComfyUI's machine have one: the result is in its memory, and they come first.
        """
        dims = {Direction.DECODE: vae.config.decoder_dim, Direction.ENCODE: vae.config.encoder_dim}
        memory = VAEMemory(direction=direction, dim=dims[direction], item_bytes=vae.dtype.itemsize)
        split = self._choose_split(size, memory, request.memory_bytes, job)
        note = split.explain(self.room.local_ranks)
        if self.plane.rank == 0:
            logger.info("VAE: %s", note)
        return apply_vae_split(vae, split, self.plane), note

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
                ranks=self.room.local_ranks,
                need=memory.bytes,
                limit=free_bytes if budget is None else min(budget, free_bytes),
            )

        free_bytes = job.agree_least(together(job, self._free_bytes))
        split = choose(free_bytes)
        is_short = split is None or split.tiles > 1
        if is_short and (budget is None or free_bytes < budget) and self.transformers.offload(job):
            free_bytes = job.agree_least(together(job, self._free_bytes))
            split = choose(free_bytes)
        if split is None:
            raise refuse_memory(
                size,
                ranks=self.room.local_ranks,
                memory=memory,
                budget=budget,
                free_bytes=free_bytes,
            )
        return split

    def _free_bytes(self) -> int:
        if self.plane.rank >= self.room.local_ranks:
            return UNLIMITED  # of another machine, whose ranks have no part
        return self.room.spare()


def advance(phase: str, chunks: Iterator[int], total: int, job: Job) -> None:
    """Work through `chunks`, on all ranks side by side, until they have done `total` frames.

    Collectives: one vote before each chunk, those of the chunk, and a vote on what `chunks` says of the result.
    """
    done = reported = 0
    while done < total:
        if done > reported:
            job.report(phase, done, total)
            reported = done
        stop_if_asked(job)
        with memory_errors():
            done = next(chunks)
    together(job, lambda: next(chunks, None))
    job.report(phase, total, total)
