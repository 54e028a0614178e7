"""A rank's answer to requests: which request needs what, and what it cost.

The transformer is cut over all ranks by the request's mesh. The VAE is whole on each rank, and all of them share its
work on a video, whatever the mesh.

Order inside a job: have the model, prepare alone, vote, run together. Whatever can fail on one rank only happens
before a vote, so that no rank waits in a collective for one that is gone.
"""

from __future__ import annotations

import torch
from typing_extensions import assert_never

from comfy_wan_dist.ipc.messages import (
    DecodeRequest,
    EncodeRequest,
    ForwardRequest,
    Request,
    SampleRequest,
)
from comfy_wan_dist.mesh.degrees import MeshDegrees

from .checkpoint.files import ModelFiles
from .forward_job import forward
from .job import Job, JobStats, Runner
from .parallel.groups import PlaneGroups
from .resident.memory import Room, peak_memory, reset_peak_memory
from .resident.transformers import Transformers, TransformerWork
from .resident.vae import ResidentVAE
from .sample_job import sample
from .vae_job import VAEWork


class PlaneRunner(Runner):
    """Runs requests on one rank of a plane, and keeps transformers and one VAE between them."""

    def __init__(
        self,
        *,
        degrees: MeshDegrees,
        rank: int,
        local_ranks: int,
        device: torch.device,
        files: ModelFiles,
    ) -> None:
        """degrees: what the plane was started for. local_ranks: how many of its ranks are on each machine."""
        self._plane = plane = PlaneGroups(layout=degrees, rank=rank)
        self._device = device
        room = Room(device=device, local_ranks=local_ranks)
        self._vae = ResidentVAE(plane=plane, files=files, room=room)
        self._transformers = Transformers(
            plane=plane, files=files, room=room, drop_vae=self._vae.clear
        )
        self._transformer_work = TransformerWork(
            plane=plane,
            transformers=self._transformers,
            device=device,
            is_one_machine=local_ranks == degrees.world_size,
        )
        self._vae_work = VAEWork(
            plane=plane, room=room, vae=self._vae, transformers=self._transformers
        )

    def run(self, request: Request, job: Job) -> JobStats:
        self._transformers.bytes_read = self._vae.bytes_read = 0
        self._plane.ledger.clear()
        reset_peak_memory(self._device)
        note = ""
        with torch.inference_mode():
            match request:
                case SampleRequest():
                    sample(request, job, self._transformer_work)
                case ForwardRequest():
                    forward(request, job, self._transformer_work)
                case DecodeRequest():
                    note = self._vae_work.decode(request, job)
                case EncodeRequest():
                    note = self._vae_work.encode(request, job)
                case _:
                    assert_never(request)
        return JobStats(
            bytes_read=self._transformers.bytes_read + self._vae.bytes_read,
            ledger=self._plane.ledger.lines(),
            peak_bytes=peak_memory(self._device),
            note=note,
        )
