"""One job of one node: cut it into pieces, have the planes do them, wait as a ComfyUI node should.

with session.open_session(planes) as session:
    request = DecodeRequest(id=session.id, ..., latent=session.send(latent), result=session.reserve(shape))
    await session.run([Piece(request=request, cost=flops)])
    images = session.tensor(request.result)
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..comfyui.devices import cuda_devices, free_devices, visible_cuda
from ..comfyui.execution import ProgressReporter, check_interrupt
from ..comfyui.folders import log_folder
from ..group.default import default_groups
from ..group.progress import overall
from ..group.queue import Piece
from ..group.scheduler import Outcome, Scheduler
from ..group.spec import LaunchSpec, plane_specs
from ..ipc.errors import InsufficientMemoryError
from ..ipc.messages import Progress, TensorRef
from ..ipc.shared import KeptTensor, Parcel
from ..mesh.degrees import parse_mesh
from ..mesh.devices import parse_devices
from ..mesh.report import peak_text
from .beside import LoopBeside
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


class Watch:
    """What the executing node shows and hears while its pieces are done."""

    def __init__(self, pieces: int) -> None:
        self._bar = ProgressReporter()
        self._latest: list[Progress | None] = [None] * pieces
        self._noted: deque[tuple[int, Progress]] = deque()

    def note(self, piece: int, progress: Progress) -> None:
        """Called in whatever thread it comes to be known in."""
        self._noted.append((piece, progress))

    def attend(self) -> None:
        """Show what was noted, and raise if the user asked to stop. Called in the node's own thread."""
        while self._noted:
            piece, progress = self._noted.popleft()
            self._latest[piece] = progress
            # A plane that loads while others work moves nothing.
            self._bar.update(*overall(self._latest))
        check_interrupt()


class Session:
    """Tensors and the run of one node's job. Made by `open_session`."""

    def __init__(
        self,
        scheduler: Scheduler,
        planes: Sequence[LaunchSpec],
        parcel: Parcel,
        loop: LoopBeside,
    ) -> None:
        self.id = uuid.uuid4().hex
        self._scheduler = scheduler
        self._planes = tuple(planes)
        self._parcel = parcel
        self._loop = loop

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

        When a device is short of memory, ComfyUI's own models are moved off it and the pieces are tried once more.
        """
        watch = Watch(len(pieces))
        self._make_room_for_starts()
        try:
            outcomes = await self._loop.attended(self._work(pieces, watch), watch.attend)
        except InsufficientMemoryError:
            if not self._makes_room():
                raise
            outcomes = await self._loop.attended(self._work(pieces, watch), watch.attend)
        return self._logged(pieces, outcomes)

    def run_blocking(self, pieces: Sequence[Piece]) -> tuple[Outcome, ...]:
        """`run` for a thread that may be in the middle of its own event loop."""
        watch = Watch(len(pieces))
        self._make_room_for_starts()
        try:
            outcomes = self._loop.blocking(self._work(pieces, watch), watch.attend)
        except InsufficientMemoryError:
            if not self._makes_room():
                raise
            outcomes = self._loop.blocking(self._work(pieces, watch), watch.attend)
        return self._logged(pieces, outcomes)

    def _make_room_for_starts(self) -> None:
        """Where a group will have to start, ComfyUI's own models make room first."""
        running = {group.spec.key for group in default_groups().registry.running_groups()}
        for plane in self._planes:
            if plane.key not in running:
                free_devices(plane.used_devices)

    def _work(
        self, pieces: Sequence[Piece], watch: Watch
    ) -> Coroutine[Any, Any, tuple[Outcome, ...]]:
        return self._scheduler.run(self._planes, pieces, self._parcel.fds, on_progress=watch.note)

    def _makes_room(self) -> bool:
        """Whether ComfyUI has moved its own models off the devices, where it can have some there."""
        on_cuda = [plane.used_devices for plane in self._planes if plane.devices.kind == "cuda"]
        for devices in on_cuda:
            free_devices(devices)
        return bool(on_cuda)

    def _logged(
        self, pieces: Sequence[Piece], outcomes: tuple[Outcome, ...]
    ) -> tuple[Outcome, ...]:
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


@contextmanager
def open_session(planes: Sequence[LaunchSpec], loop: LoopBeside | None = None) -> Iterator[Session]:
    """A job for any of `planes`. Groups are found or started when a piece needs one.

    loop: of a caller that keeps one for many sessions.
    """
    scheduler = default_groups().scheduler
    with ExitStack() as stack:
        if loop is None:
            loop = LoopBeside()
            stack.callback(loop.close)
        yield Session(scheduler, planes, stack.enter_context(scheduler.parcel()), loop)
