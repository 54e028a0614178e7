"""The VAE that a rank holds between jobs, whole."""

from __future__ import annotations

from comfy_wan_dist.ipc.messages import VAESpec
from workers.checkpoint.files import ModelFiles
from workers.checkpoint.sharing import build_read_groups
from workers.checkpoint.vae import build_vae, load_vae_weights, vae_bytes
from workers.job import Job, load_milestone, together
from workers.model.dtypes import dtype_named
from workers.parallel.groups import PlaneGroups
from workers.vae.wan22 import WanVAE

from .memory import Room
from .transformers import Transformers


class ResidentVAE:
    """The latest VAE, or none. bytes_read: what was asked of files since it was last set to 0."""

    def __init__(self, *, plane: PlaneGroups, files: ModelFiles, room: Room) -> None:
        self.bytes_read = 0
        self._plane = plane
        self._files = files
        self._room = room
        self._held: dict[VAESpec, WanVAE] = {}

    def have(self, spec: VAESpec, transformers: Transformers, job: Job) -> WanVAE:
        """The VAE `spec` names, loaded if it is not the one at hand.

        Where it finds no room the transformers' weights go to host memory. Collectives: votes, and those of the load.
        """
        if spec in self._held:
            return self._held[spec]
        self.clear()
        dtype = dtype_named(spec.dtype)

        def spare_memory() -> int:
            return self._room.usable() - vae_bytes(self._files.read(spec).path, dtype=dtype)

        if job.agree_least(together(job, spare_memory)) < 0:
            transformers.offload(job)
        vae, entries = together(
            job,
            lambda: build_vae(self._files.read(spec).path, dtype=dtype, device=self._room.device),
        )
        sharing = build_read_groups(self._plane, local_ranks=self._room.local_ranks, is_whole=True)

        def load() -> int:
            bytes_read = load_vae_weights(
                vae, entries, sharing=sharing, milestone=load_milestone(job)
            )
            self._files.read(spec)  # still the same
            return bytes_read

        self.bytes_read += together(job, load)
        self._held[spec] = vae
        return vae

    def clear(self) -> None:
        """Give up the VAE and its memory."""
        self._held.clear()
        self._room.release()
