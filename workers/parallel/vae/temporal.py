"""The VAE's frames shared out over ranks as runs, exactly: a rank's history is what the rank before it works on.

All ranks go through the layers together. Before each convolution over time the last frames that it saw go to the
next rank, and from the last rank to the first one for the next chunk. Only the first rank of the first chunk is at
the start of the video, with what that means for the first frame (workers/vae/layers.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.parallel.collectives import AxisGroup
from workers.vae.layers import FrameHistory


class RelayedHistory(FrameHistory):
    """History of one rank of the time axis.

    chunks: the ranks' latent frames in each chunk (mesh/vae_split.py). A rank that another one looks back on has at
    every level as many frames as a convolution looks back.
    Collectives: per convolution one exchange with the next rank and the one before.
    """

    def __init__(self, time: AxisGroup, chunks: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.is_start = time.rank == 0
        self._time = time
        self._chunks = chunks
        self._index = 0

    def next_chunk(self) -> None:
        super().next_chunk()
        self._index += 1

    def extend(self, conv: nn.Module, x_bthwc: Tensor, frames: int) -> Tensor:
        rank = self._time.rank
        active = sum(size > 0 for size in self._chunks[self._index])
        if active == 1:
            return super().extend(conv, x_bthwc, frames)
        tail_bthwc = x_bthwc[:, -frames:].contiguous()
        # The first rank looks back on the last one's frames of the chunk before.
        senders = range(active) if self._index + 1 < len(self._chunks) else range(active - 1)
        send = {(rank + 1) % active: tail_bthwc} if rank in senders else {}
        previous = (rank - 1) % active
        receive = {previous: torch.empty_like(tail_bthwc)} if previous in senders else {}
        self._time.exchange(send, receive).wait()
        if rank > 0:
            return torch.cat([receive[previous], x_bthwc], dim=1)
        earlier = self._frames.get(conv)
        if receive:
            self._frames[conv] = receive[previous]
        return x_bthwc if earlier is None else torch.cat([earlier, x_bthwc], dim=1)
