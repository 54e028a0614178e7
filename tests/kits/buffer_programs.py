"""What the ranks of the test pool run for test_copies.py."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from comfy_wan_dist.ipc.messages import DecodeRequest, VAESpec
from comfy_wan_dist.ipc.shared import BufferPool, Parcel, SharedBuffer, view_of
from workers.parallel.agreement import Agreement
from workers.process import buffers
from workers.process.buffers import build_buffers

HEAD_RANKS = 2


def adopted_tensors(rank: int, world_size: int, has_buffers: bool) -> list[Tensor] | str:
    """Latent and result as each rank gets them, or what it raises; the client's side is made on every head rank."""
    agreement = Agreement(rank=rank, size=world_size, group=dist.new_group())
    adopt = build_buffers(
        rank=rank, head_ranks=HEAD_RANKS, world_size=world_size, agreement=agreement
    )
    parcel = Parcel(BufferPool())
    _, latent = parcel.pack([torch.zeros(5), torch.arange(12.0).view(3, 4)])
    result = parcel.reserve((2, 2), torch.float32)
    parcel.tensor(result).fill_(7)
    request = DecodeRequest(
        id="job",
        vae=VAESpec(path="vae", file_bytes=1, mtime_ns=1, dtype="float32"),
        latent=latent,
        result=result,
    )
    given = [os.dup(fd) for fd in parcel.fds] if rank < HEAD_RANKS else []
    if not has_buffers:
        for fd in given:
            os.close(fd)
        given = []
    try:
        adopted = adopt(request, given)
        return [view_of(adopted, ref).clone() for ref in (latent, result)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def without_broadcast(rank: int, world_size: int) -> list[Tensor] | str:
    """`adopted_tensors` when rank 0's tensors are not sent."""
    original = buffers.bytes_of
    buffers.bytes_of = lambda adopted, ref: original(adopted, ref)[:0]  # type: ignore[assignment]
    try:
        return adopted_tensors(rank, world_size, True)
    finally:
        buffers.bytes_of = original


def without_room(rank: int, world_size: int) -> list[Tensor] | str:
    """`adopted_tensors` when the last rank's machine has no memory for them."""

    def none_left(fileno: int, size: int) -> SharedBuffer:
        raise OSError("no memory")

    if rank < world_size - 1:
        return adopted_tensors(rank, world_size, True)
    with mock.patch.object(buffers, "mmap", SimpleNamespace(mmap=none_left)):
        return adopted_tensors(rank, world_size, True)
