"""One job of one node: find or start the group, hand the request over, wait for it as a ComfyUI node should.

async with session.open_session(degrees, devices) as job:
    request = DecodeRequest(id=job.id, ..., latent=job.send(latent), result=job.reserve(shape))
    await job.run(request)
    images = job.tensor(request.result)
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from . import comfy_adapter
from .group.client import WorkerGroup
from .group.registry import default_registry
from .group.spec import LaunchSpec
from .handle import ModelHandle, ResolvedModel, resolve_model
from .ipc.errors import InsufficientMemoryError
from .ipc.messages import Done, JobRequest, Progress, TensorRef
from .ipc.shared import Parcel
from .mesh.degrees import MeshDegrees, parse_mesh
from .mesh.devices import DeviceList, parse_devices

logger = logging.getLogger("comfy_wan_dist")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """Which group serves a node."""

    degrees: MeshDegrees
    devices: DeviceList


def resolve(handle: ModelHandle) -> ResolvedModel:
    """The handle checked against its file and this machine. Raises ModelFileError, MeshError, ConfigError."""
    devices = comfy_adapter.cuda_devices()
    return resolve_model(
        handle,
        visible_cuda=len(devices),
        cuda_memory=min((memory for _, memory in devices), default=None),
    )


def plane_of(handle: ModelHandle) -> Plane:
    """The group for work that any mesh can do, such as the VAE's: a running one on the handle's devices if its mesh is
    `auto`, so that decoding does not restart what sampled."""
    visible = comfy_adapter.visible_cuda()
    if parse_mesh(handle.mesh) is None:
        devices = parse_devices(handle.devices, visible_cuda=visible)
        for group in default_registry().running_groups():
            used = group.spec.used_devices
            if used.kind == devices.kind and set(used.indices) <= set(devices.indices):
                return Plane(degrees=group.spec.degrees, devices=used)
    resolved = resolve(handle)
    return Plane(degrees=resolved.degrees, devices=resolved.devices)


class Session:
    """Tensors and the run of one job. Made by `open_session`."""

    def __init__(self, group: WorkerGroup, parcel: Parcel) -> None:
        self.id = uuid.uuid4().hex
        self._group = group
        self._parcel = parcel

    def send(self, tensor: Tensor) -> TensorRef:
        """Copy a tensor to where the ranks see it."""
        (ref,) = self._parcel.pack([tensor])
        return ref

    def send_optional(self, tensor: Tensor | None) -> TensorRef | None:
        return None if tensor is None else self.send(tensor)

    def reserve(self, shape: Sequence[int]) -> TensorRef:
        """Room for a float32 result."""
        return self._parcel.reserve(shape, torch.float32)

    def tensor(self, ref: TensorRef) -> Tensor:
        """The result, without a copy. It stays valid after the session."""
        return self._parcel.tensor(ref)

    async def run(self, request: JobRequest) -> tuple[Done, ...]:
        """Have the request done, with ComfyUI's progress bar and interrupt; the ranks' answers. Raises what they raise.

        When a device is short of memory, ComfyUI's own models are moved off it and the job is tried once more.
        """
        try:
            return await self._run(request)
        except InsufficientMemoryError:
            devices = self._group.spec.used_devices
            if devices.kind != "cuda":
                raise
            comfy_adapter.free_devices(devices)
            return await self._run(request)

    async def _run(self, request: JobRequest) -> tuple[Done, ...]:
        bar = comfy_adapter.ProgressReporter()

        def show(progress: Progress) -> None:
            if progress.phase == "load":  # bytes: too many for a bar that prints its numbers
                bar.update(100 * progress.done // max(progress.total, 1), 100)
            else:
                bar.update(progress.done, progress.total)

        answers = await self._group.run(
            request,
            self._parcel.fds,
            on_progress=show,
            check_interrupt=comfy_adapter.check_interrupt,
        )
        logger.info(
            "[wan-dist] %s on mesh %s: %.2f s, %d bytes read from disk",
            type(request).__name__,
            self._group.spec.degrees,
            max(answer.seconds for answer in answers),
            sum(answer.bytes_read for answer in answers),
        )
        return answers


@asynccontextmanager
async def open_session(degrees: MeshDegrees, devices: DeviceList) -> AsyncIterator[Session]:
    """Lease the group for `degrees` on `devices`, starting it if it is not there. Raises WorkerStartError."""
    spec = LaunchSpec(
        degrees=degrees, devices=devices, log_path=comfy_adapter.log_folder() / f"{degrees}.log"
    )
    registry = default_registry()
    if all(group.spec.key != spec.key for group in registry.running_groups()):
        comfy_adapter.free_devices(spec.used_devices)
    async with registry.lease(spec, check_interrupt=comfy_adapter.check_interrupt) as group:
        with group.parcel() as parcel:
            yield Session(group, parcel)
