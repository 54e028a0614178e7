"""A request's tensors as a rank gets them.

Ranks of ComfyUI's machine map the descriptors that come with the request. A rank of another machine gets copies of
what the request reads, by broadcast from rank 0, and for the result untouched memory of the right size, so that both
check requests alike; only rank 0 writes results.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from comfy_wan_dist.ipc.channel import MAX_FDS
from comfy_wan_dist.ipc.errors import InsufficientMemoryError, ProtocolError
from comfy_wan_dist.ipc.messages import RESULT, Request, TensorRef, tensor_refs
from comfy_wan_dist.ipc.shared import MAX_BUFFER_BYTES, MapCache, SharedBuffer, view_of
from workers.parallel.agreement import Agreement

MAP_CACHE_BYTES = 256 * 2**20
# Of one tensor: a gigabyte of frames may cross a slow network.
TRANSFER_TIMEOUT = timedelta(minutes=5)

Buffers = tuple[SharedBuffer, ...]


AdoptBuffers = Callable[[Request, Sequence[int]], Buffers]
"""The request's buffers in the order in which its refs count them; closes the descriptors. Raises ProtocolError."""


def build_buffers(
    *, rank: int, head_ranks: int, world_size: int, agreement: Agreement
) -> AdoptBuffers:
    """For a plane whose first `head_ranks` ranks are on ComfyUI's machine.

    Collectives: with several machines one `new_group`, which all ranks make.
    """
    maps = MapCache(max_bytes=MAP_CACHE_BYTES)
    if world_size == head_ranks:
        return lambda request, fds: maps.adopt(fds)
    members = [0, *range(head_ranks, world_size)]
    group = dist.new_group(members, backend="gloo", timeout=TRANSFER_TIMEOUT)
    return BroadcastBuffers(
        maps=maps if rank < head_ranks else None,
        members=group if rank in members else None,
        agreement=agreement,
    ).adopt


class BroadcastBuffers:
    """With several machines: mappings on ComfyUI's, elsewhere copies of rank 0's.

    maps: None elsewhere. members: rank 0, which is the first, and the ranks elsewhere; None on other ranks.
    """

    def __init__(
        self,
        *,
        maps: MapCache | None,
        members: dist.ProcessGroup | None,
        agreement: Agreement,
    ) -> None:
        self._maps = maps
        self._members = members
        self._agreement = agreement

    def adopt(self, request: Request, fds: Sequence[int]) -> Buffers:
        """Collectives: the members' broadcast of all sizes, a vote of all ranks, the members'
        broadcast of each input. What a rank meets before the vote is raised on all, and nothing is sent.
        """
        buffers: Buffers = ()
        inputs: list[Tensor] = []
        error: Exception | None = None
        try:
            if self._maps is not None:
                buffers = self._maps.adopt(fds)
        except Exception as caught:  # the others must hear of it, whatever it is
            error = caught
        sizes = self._share_sizes(buffers)
        try:
            if self._maps is None:
                buffers = tuple(untouched_buffer(size) for size in sizes)
            refs = tensor_refs(request).items()
            inputs = [bytes_of(buffers, ref) for name, ref in refs if name != RESULT]
        except Exception as caught:
            error = error or caught
        self._agreement.agree(error)
        if self._members is not None:
            for flat in inputs:
                if flat.numel():
                    dist.broadcast(flat, src=0, group=self._members)
        return buffers

    def _share_sizes(self, buffers: Buffers) -> list[int]:
        """Rank 0's buffers in bytes; none if it has failed."""
        header = torch.zeros(1 + MAX_FDS, dtype=torch.int64, device="cpu")
        own = torch.tensor([len(buffers), *(buffer.size for buffer in buffers)], dtype=torch.int64)
        header[: len(own)] = own
        if self._members is not None:
            dist.broadcast(header, src=0, group=self._members)
        count, *sizes = header.tolist()
        return sizes[:count]


def bytes_of(buffers: Sequence[SharedBuffer], ref: TensorRef) -> Tensor:
    """`view_of` as bytes [n] uint8."""
    return view_of(buffers, ref).view(-1).view(torch.uint8)


def untouched_buffer(size: int) -> SharedBuffer:
    """Memory that takes no room until it is written. Raises ProtocolError, InsufficientMemoryError."""
    if not 0 < size <= MAX_BUFFER_BYTES:
        raise ProtocolError(
            f"a buffer of {size} bytes was announced; at most {MAX_BUFFER_BYTES} may travel"
        )
    try:
        return SharedBuffer(mmap.mmap(-1, size))
    except OSError as error:
        raise InsufficientMemoryError(
            f"another machine has no room for {size} bytes of the job's tensors; make the video smaller"
        ) from error
