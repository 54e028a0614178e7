"""Collectives of one mesh axis, and the ledger of what they send.

Every operation takes its group from an `AxisGroup`, is the identity at size 1, and books op, axis, dtype, calls
and bytes. Bytes are the size of the tensor that the rank puts into the operation (for a gather its own shard),
which is what mesh planning predicts; the share that crosses a link follows from the group's size.

Compiled blocks take their groups from compile.py, which keeps these functions out of the graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from comfy_wan_dist.ipc.messages import LedgerLine


class Ledger:
    """Counts of one rank. Lines are keyed by (op, axis, dtype)."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._bytes: Counter[tuple[str, str, str]] = Counter()

    def book(self, op: str, axis: str, tensor: Tensor) -> None:
        key = (op, axis, str(tensor.dtype).removeprefix("torch."))
        self._calls[key] += 1
        self._bytes[key] += tensor.numel() * tensor.element_size()

    def clear(self) -> None:
        self._calls.clear()
        self._bytes.clear()

    def lines(self) -> tuple[LedgerLine, ...]:
        return tuple(
            LedgerLine(
                op=key[0], axis=key[1], dtype=key[2], calls=self._calls[key], bytes=self._bytes[key]
            )
            for key in sorted(self._calls)
        )


@dataclass(frozen=True, kw_only=True)
class AxisGroup:
    """The ranks that this rank works with along one axis. `group` is None at size 1."""

    axis: str
    size: int
    rank: int
    group: dist.ProcessGroup | None
    ledger: Ledger

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum over the group, in place where x is contiguous. The result is bit-identical on all ranks."""
        if self.size == 1:
            return x
        x = x.contiguous()
        self.ledger.book("all_reduce", self.axis, x)
        dist.all_reduce(x, group=self.group)
        return x

    def all_to_all(self, x: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange runs of dim 0: `send[i]` rows go to rank i, `receive[i]` rows come from it, in rank order."""
        if self.size == 1:
            return x
        x = x.contiguous()
        self.ledger.book("all_to_all", self.axis, x)
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x, list(receive), list(send), group=self.group)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack x of every rank on a new dim 0, in rank order. Shapes must be equal."""
        if self.size == 1:
            return x.unsqueeze(0)
        x = x.contiguous()
        self.ledger.book("all_gather", self.axis, x)
        out = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(out.unbind()), x, group=self.group)
        return out

    def gather_uneven(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate the shards of dim 0 in rank order on every rank; rank i holds `sizes[i]` rows.

        An all-to-all in which every rank sends its shard to all: gloo has no uneven all-gather.
        """
        if self.size == 1:
            return x
        copies = x.contiguous().repeat(self.size, *[1] * (x.dim() - 1))
        self.ledger.book("gather", self.axis, x)
        out = x.new_empty((sum(sizes), *x.shape[1:]))
        dist.all_to_all_single(out, copies, list(sizes), [x.shape[0]] * self.size, group=self.group)
        return out
