"""What the ranks of the test pool run for the VAE besides `devtools.vae_runs`: broken exchanges, rows of jobs.

A fault replaces one seam of the product by a mistake that is easily made there, on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rank_programs import StoppingJob
from torch import Tensor, nn

from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.ipc.messages import ModelSpec, Request, VAESpec
from devtools.mesh_runs import Inputs, LocalJob, Schedule, build_local_runner, build_request
from devtools.vae_runs import build_decode, build_encode
from workers.job import JobStats
from workers.parallel.collectives import AxisGroup, Exchange
from workers.parallel.vae import share as vae_share
from workers.parallel.vae import spatial
from workers.parallel.vae.spatial import DownsampleBorder, HaloBorder, WidenedPart
from workers.parallel.vae.temporal import RelayedHistory
from workers.resident import slot as loaded
from workers.resident.memory import UNLIMITED, Room, peak_memory, reset_peak_memory
from workers.resident.offloaded import OffloadedWeights
from workers.vae.layers import (
    Border,
    CausalConv3d,
    FrameAttention,
    FrameConv2d,
    FrameHistory,
    Upsample,
    frame_attention,
    pad_bottom_right,
)
from workers.vae.wan22 import WanVAE
from workers.vae_job import VAEWork


def no_causal_halo() -> AbstractContextManager[Any]:
    """Zeros instead of the neighbours' rows before the 3x3x3 convolutions."""
    return _after_split(lambda name, module: isinstance(module, CausalConv3d))


def no_halo_of_one_convolution() -> AbstractContextManager[Any]:
    """Zeros instead of the neighbours' rows before the last convolution of decoder and encoder only."""
    return _after_split(lambda name, module: name.endswith("coder.head.2"))


def no_upsample_halo() -> AbstractContextManager[Any]:
    return _after_split(
        lambda name, module: isinstance(module, FrameConv2d) and module.stride == (1, 1)
    )


def no_downsample_halo() -> AbstractContextManager[Any]:
    return _after_split(
        lambda name, module: isinstance(module, FrameConv2d) and module.stride == (2, 2)
    )


def attention_not_gathered() -> AbstractContextManager[Any]:
    return _after_split(lambda name, module: isinstance(module, FrameAttention))


def _after_split(is_meant: Callable[[str, nn.Module], bool]) -> AbstractContextManager[Any]:
    """Modules that `is_meant` picks see nothing of other ranks."""
    original = spatial.apply_spatial_split

    def apply(vae: WanVAE, space: AxisGroup, **options: Any) -> None:
        original(vae, space, **options)
        for name, module in vae.named_modules():
            if not is_meant(name, module):
                continue
            if isinstance(module, FrameAttention):
                module.attention = frame_attention
            elif isinstance(getattr(module, "border", None), HaloBorder):
                module.border = _zero_border(module.border.dim)
            elif isinstance(getattr(module, "border", None), DownsampleBorder):
                module.border = pad_bottom_right

    return mock.patch.object(vae_share, "apply_spatial_split", apply)


def _zero_border(dim: int) -> Border:
    padding = (0, 0, 0, 0, 1, 1) if dim == 2 else (0, 0, 1, 1)
    return lambda x, prepare: F.pad(prepare(x), padding)


def halos_from_the_wrong_side() -> AbstractContextManager[Any]:
    """Each rank takes its last row for its first one when it sends."""
    original = HaloBorder.edges

    def swapped(self: HaloBorder, x: Tensor) -> Mapping[int, Tensor]:
        return original(self, x.flip(self.dim))

    return mock.patch.object(HaloBorder, "edges", swapped)


def no_relay(kernel: tuple[int, int, int], time_stride: int) -> AbstractContextManager[Any]:
    """Ranks look back on frames of their own only, before convolutions of one kind."""
    original = RelayedHistory.extend

    def local(self: RelayedHistory, conv: nn.Module, x: Tensor, frames: int) -> Tensor:
        assert isinstance(conv, CausalConv3d)
        if (conv.kernel_size, conv.stride[0]) == (kernel, time_stride):
            return FrameHistory.extend(self, conv, x, frames)
        return original(self, conv, x, frames)

    return mock.patch.object(RelayedHistory, "extend", local)


def no_relay_to_spatial() -> AbstractContextManager[Any]:
    return no_relay((3, 3, 3), 1)


def no_relay_to_doubling() -> AbstractContextManager[Any]:
    return no_relay((3, 1, 1), 1)


def no_relay_to_halving() -> AbstractContextManager[Any]:
    return no_relay((3, 1, 1), 2)


def no_relay_between_chunks() -> AbstractContextManager[Any]:
    """The first rank begins each chunk as if nothing had been before."""
    original = RelayedHistory.next_chunk

    def forget(self: RelayedHistory) -> None:
        original(self)
        self._frames = {conv: frames * 0 for conv, frames in self._frames.items()}

    return mock.patch.object(RelayedHistory, "next_chunk", forget)


def first_frame_in_history() -> AbstractContextManager[Any]:
    """The first frame is part of what later ones look back on where the decoder doubles frames."""
    original = Upsample.forward

    def forward(self: Upsample, x: Tensor, history: FrameHistory) -> Tensor:
        if self.time_conv is not None and history.is_start:
            history.prime(self.time_conv, x[:, :1])
        return original(self, x, history)

    return mock.patch.object(Upsample, "forward", forward)


def first_frame_not_in_history() -> AbstractContextManager[Any]:
    """The first frame is not part of what later ones look back on where the encoder halves frames."""
    return mock.patch.object(FrameHistory, "prime")


def nothing_around_a_part() -> AbstractContextManager[Any]:
    """Tiles at the border of a part take its outermost position for what lies beyond."""

    def alone(self: WidenedPart, x: Tensor) -> Tensor:
        rank, sizes = self.space.rank, self.sizes
        start = sum(sizes[:rank])
        first = x.narrow(self.dim, 0, 1).expand(
            *(start - self.held.start if dim == self.dim else -1 for dim in range(5))
        )
        behind = self.held.stop - start - sizes[rank]
        last = x.narrow(self.dim, sizes[rank] - 1, 1).expand(
            *(behind if dim == self.dim else -1 for dim in range(5))
        )
        return torch.cat([first, x, last], dim=self.dim)

    return mock.patch.object(WidenedPart, "__call__", alone)


def group_rank_as_plane_rank() -> AbstractContextManager[Any]:
    """Whoever is rank 1 of a group is taken for rank 1 of the plane."""
    original = AxisGroup.exchange

    def mistaken(
        self: AxisGroup, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]
    ) -> Exchange:
        return original(replace(self, ranks=tuple(range(self.size))), send, receive)

    return mock.patch.object(AxisGroup, "exchange", mistaken)


def out_of_memory_once() -> AbstractContextManager[Any]:
    """No memory is left for the second chunk that is decoded."""
    original, calls = WanVAE.decode_chunk, count(1)

    def decode_chunk(self: WanVAE, z: Tensor, history: FrameHistory) -> Tensor:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("tried to allocate 1 GiB")
        return original(self, z, history)

    return mock.patch.object(WanVAE, "decode_chunk", decode_chunk)


@dataclass(frozen=True, kw_only=True)
class VAEJob:
    """A job of the runner: decode `latent` to frames of `dtype`, or else encode `frames` to so many channels.

    memory_bytes: what a rank may take for it.
    stop: the rank that is told to stop, and before which chunk, counted from 1.
    """

    latent: Tensor | None = None
    frames: Tensor | None = None
    channels: int = 48
    dtype: torch.dtype = torch.float32
    memory_bytes: int | None = None
    stop: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class VAEJobEnd:
    """How a job ended on one rank, but for the VAE's loading; `result` is NaN where it has written nothing."""

    error: str
    reports: list[tuple[str, int, int]]
    result: Tensor
    stats: JobStats


def run_vae_jobs(
    rank: int, mesh: str, spec: VAESpec, jobs: Sequence[VAEJob], machines: int = 1
) -> list[VAEJobEnd]:
    """One job after the other on one runner."""
    runner, agreement = build_local_runner(rank, mesh, machines=machines)
    ends = []
    for each in jobs:
        request: Request
        if each.latent is not None:
            decode, tensors = build_decode(spec, each.latent, each.dtype)
            request = replace(decode, memory_bytes=each.memory_bytes)
        else:
            assert each.frames is not None
            encode, tensors = build_encode(spec, each.frames, each.channels)
            request = replace(encode, memory_bytes=each.memory_bytes)
        job = LocalJob(tensors, agreement)
        if each.stop is not None and each.stop[0] == rank:
            job = StoppingJob(tensors, agreement)
            job.stop_at = each.stop[1]
        error, stats = "no error", JobStats()
        try:
            stats = runner.run(request, job)  # type: ignore[arg-type]
        except WanDistError as caught:
            error = f"{type(caught).__name__}: {caught}"
        agreement.take_failure()
        reports = [report for report in job.reports if report[0] != "load"]
        ends.append(VAEJobEnd(error=error, reports=reports, result=tensors[-1], stats=stats))
    return ends


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A sampling, or else a decode, on devices that have so many bytes left.

    free_bytes: each time the VAE asks for its tensors. usable: each time it is weights that need room.
    """

    is_decode: bool = False
    free_bytes: tuple[int, ...] = ()
    usable: tuple[int, ...] = (UNLIMITED,)


@dataclass(frozen=True, kw_only=True)
class TurnEnd:
    """held: bytes of the transformer's weights on the device afterwards."""

    error: str
    result: Tensor
    stats: JobStats
    held: int


def sample_and_decode(
    rank: int,
    mesh: str,
    model: ModelSpec,
    vae: VAESpec,
    inputs: Inputs,
    schedule: Schedule,
    latent: Tensor,
    turns: Sequence[Turn],
    no_host_memory_on: int | None = None,
) -> list[TurnEnd]:
    """Equal samplings and equal decodes on one runner, on devices with memory of their own.

    no_host_memory_on: the rank whose weights do not get away the first time.
    """
    runner, agreement = build_local_runner(rank, mesh)
    park = [MemoryError("none left")] if rank == no_host_memory_on else []
    ends = []
    with (
        mock.patch.object(Room, "has_host", True),
        mock.patch.object(loaded, "OffloadedWeights", side_effect=lambda x: fail_once(park, x)),
    ):
        for turn in turns:
            request: Request
            if turn.is_decode:
                request, tensors = build_decode(vae, latent)
            else:
                request, tensors = build_request(model, inputs, schedule, mesh=mesh)
            error, stats = "no error", JobStats()
            with (
                mock.patch.object(VAEWork, "_free_bytes", side_effect=turn.free_bytes),
                mock.patch.object(Room, "usable", side_effect=turn.usable),
            ):
                try:
                    stats = runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
                except WanDistError as caught:
                    error = f"{type(caught).__name__}: {caught}"
            agreement.take_failure()
            held = runner._transformers.model.device_bytes()
            ends.append(TurnEnd(error=error, result=tensors[-1].clone(), stats=stats, held=held))
    return ends


def fail_once(errors: list[MemoryError], model: nn.Module) -> OffloadedWeights:
    if errors:
        raise errors.pop()
    return OffloadedWeights(model)


LARGE = 64 * 2**20
"""Bytes; large enough for malloc to give it back at once."""


def peak_around_a_large_tensor(rank: int) -> tuple[int, int, int]:
    """The most since a reset: before there is a tensor of LARGE bytes, with it, and reset once more after it."""
    cpu = torch.device("cpu")
    torch.ones(LARGE, dtype=torch.uint8)  # whatever else torch takes for one
    reset_peak_memory(cpu)
    before = peak_memory(cpu)
    torch.ones(LARGE, dtype=torch.uint8)
    during = peak_memory(cpu)
    reset_peak_memory(cpu)
    return before, during, peak_memory(cpu)


def peak_of_a_tensor(rank: int) -> tuple[int, int]:
    """Bytes of a tensor, and what PeakMemory sees of it in a process of its own.

    A long-lived one may lose meanwhile what it has not touched for long, to a system that reclaims memory ahead of
    need, and that hides as much growth.
    """
    from benchmarks.vae import PeakMemory

    with PeakMemory() as memory:
        kept = torch.ones(2**24)  # too large to come from freed memory
        time.sleep(0.2)
    return kept.nbytes, memory.peak
