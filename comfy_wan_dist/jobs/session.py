"""One job of one node: cut it into pieces, have the planes do them, wait as a ComfyUI node should.

async with session.open_session(planes) as session:
    request = DecodeRequest(id=session.id, ..., latent=session.send(latent), result=session.reserve(shape))
    await session.run([Piece(request=request, cost=flops)])
    images = session.tensor(request.result)
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch
from torch import Tensor

from ..comfyui.devices import cuda_devices, free_devices, visible_cuda
from ..comfyui.execution import ProgressReporter, check_interrupt
from ..comfyui.folders import log_folder
from ..group.default import default_groups
from ..group.progress import overall
from ..group.queue import Piece
from ..group.scheduler import Caller, Outcome, Scheduler
from ..group.spec import LaunchSpec, plane_specs
from ..ipc.messages import Progress, TensorRef
from ..ipc.shared import KeptTensor, Parcel
from ..mesh.degrees import parse_mesh
from ..mesh.devices import parse_devices
from ..mesh.report import peak_text
from .handle import ModelHandle, ResolvedModel, resolve_model

logger = logging.getLogger("comfy_wan_dist")


def planes_for(model: ResolvedModel) -> tuple[LaunchSpec, ...]:
    """The groups that hold the model."""
    return plane_specs(
        model.degrees, model.devices, log_folder=log_folder(), machines=model.machines
    )


def resolve(handle: ModelHandle) -> ResolvedModel:
    """The handle checked against its file and this machine. Raises ModelFileError, MeshError, ConfigError."""
    devices = cuda_devices()
    return resolve_model(
        handle,
        visible_cuda=len(devices),
        cuda_memory=min((memory for _, memory in devices), default=None),
    )


def planes_of(handle: ModelHandle) -> tuple[LaunchSpec, ...]:
    """The groups for work that any mesh can do, such as the VAE's: running ones on the handle's devices if its mesh is
    `auto`, so that decoding does not restart what sampled."""
    visible = visible_cuda()
    if parse_mesh(handle.mesh) is None:
        devices = parse_devices(handle.devices, visible_cuda=visible)
        running = tuple(
            group.spec
            for group in default_groups().registry.running_groups()
            if group.spec.used_devices.kind == devices.kind
            and set(group.spec.used_devices.indices) <= set(devices.indices)
        )
        if running:
            return running
    return planes_for(resolve(handle))


class Session:
    """Tensors and the run of one node's job. Made by `open_session`."""

    def __init__(self, scheduler: Scheduler, planes: Sequence[LaunchSpec], parcel: Parcel) -> None:
        self.id = uuid.uuid4().hex
        self._scheduler = scheduler
        self._planes = tuple(planes)
        self._parcel = parcel

    def send(self, tensor: Tensor) -> TensorRef:
        """Copy a tensor to where the ranks see it."""
        (ref,) = self._parcel.pack([tensor])
        return ref

    def send_split(
        self, tensor: Tensor, sizes: Sequence[int], *, dim: int = 0
    ) -> tuple[TensorRef, ...]:
        """`send` a tensor cut into `sizes` along `dim`."""
        return self._parcel.pack(tensor.split(list(sizes), dim))

    def lend(self, kept: KeptTensor) -> TensorRef:
        """A tensor of `keep_tensor` among this job's, without a copy."""
        return self._parcel.lend(kept)

    def reserve(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> TensorRef:
        """Room for a result."""
        return self._parcel.reserve(shape, dtype)

    def tensor(self, ref: TensorRef) -> Tensor:
        """The result, without a copy. It stays valid after the session."""
        return self._parcel.tensor(ref)

    async def run(self, pieces: Sequence[Piece]) -> tuple[Outcome, ...]:
        """Have the pieces done, with ComfyUI's progress bar and interrupt. Raises what the ranks raise.

        When a device is short of memory, ComfyUI's own models are moved off it and the piece is tried once more.
        """
        bar = ProgressReporter()
        latest: list[Progress | None] = [None] * len(pieces)

        def show(piece: int, progress: Progress) -> None:
            latest[piece] = progress
            bar.update(*overall(latest))  # a plane that loads while others work moves nothing

        caller = Caller(on_progress=show, check_interrupt=check_interrupt, make_room=free_devices)
        outcomes = await self._scheduler.run(self._planes, pieces, self._parcel.fds, caller=caller)
        for piece, outcome in zip(pieces, outcomes, strict=True):
            bytes_read = sum(answer.bytes_read for answer in outcome.answers)
            logger.log(
                logging.DEBUG if piece.is_one_of_many and not bytes_read else logging.INFO,
                "[wan-dist] %s on mesh %s%s%s: %.2f s, %d bytes read from disk, peak memory by rank %s GiB",
                type(piece.request).__name__,
                outcome.plane.degrees,
                self._plane_label(outcome),
                f", {outcome.requests} requests in one run" if outcome.requests > 1 else "",
                max(answer.seconds for answer in outcome.answers),
                bytes_read,
                peak_text(outcome.answers),
            )
        return outcomes

    def _plane_label(self, outcome: Outcome) -> str:
        if len(self._planes) == 1:
            return ""
        return f", plane {self._planes.index(outcome.plane)} of {len(self._planes)}"


def keep_tensor(tensor: Tensor) -> KeptTensor:
    """A copy of a tensor where ranks see it, for the sessions that it is lent to."""
    return default_groups().scheduler.keep(tensor)


@asynccontextmanager
async def open_session(planes: Sequence[LaunchSpec]) -> AsyncIterator[Session]:
    """A job for any of `planes`. Groups are found or started when a piece needs one."""
    scheduler = default_groups().scheduler
    with scheduler.parcel() as parcel:
        yield Session(scheduler, planes, parcel)
