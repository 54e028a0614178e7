"""Collectives of one mesh axis, and the ledger of what they send.

Every operation takes its group from an `AxisGroup`, is the identity at size 1, and books op, axis, dtype, calls,
bytes and time. Bytes are the size of what the rank puts into the operation (for a gather its own shard), rows that only
fill up a shorter shard included; mesh planning predicts them. The share that crosses a link follows from the group's
size. A broadcast is booked by its sender, a transfer by the rank that sends.

Compiled blocks take their groups from compile.py, which keeps these functions out of the graphs.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from comfy_wan_dist.ipc.messages import LedgerLine

LineKey = tuple[str, str, str]
"""op, axis, dtype."""
Span = Callable[[], float]
"""Seconds, once they are known."""


class Ledger:
    """Counts of one rank. Lines are keyed by (op, axis, dtype)."""

    def __init__(self) -> None:
        self._calls: Counter[LineKey] = Counter()
        self._bytes: Counter[LineKey] = Counter()
        self._spans: defaultdict[LineKey, list[Span]] = defaultdict(list)

    def book(self, op: str, axis: str, x: Tensor) -> AbstractContextManager[None]:
        """One call that takes `x`. The time spent in the returned context is its."""
        key = (op, axis, str(x.dtype).removeprefix("torch."))
        self._calls[key] += 1
        self._bytes[key] += x.nbytes
        return timed(self._spans[key], x.device)

    def clear(self) -> None:
        self._calls.clear()
        self._bytes.clear()
        self._spans.clear()

    def lines(self) -> tuple[LedgerLine, ...]:
        """Waits for the device, if it has not come to the last call yet."""
        return tuple(
            LedgerLine(
                op=key[0],
                axis=key[1],
                dtype=key[2],
                calls=self._calls[key],
                bytes=self._bytes[key],
                seconds=sum(span() for span in self._spans[key]),
            )
            for key in sorted(self._calls)
        )


@contextlib.contextmanager
def timed(spans: list[Span], device: torch.device) -> Iterator[None]:
    """Add to `spans` what the block took: by the clock, or on CUDA of the current stream without waiting for it."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()

        def seconds() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000

        spans.append(seconds)
    else:
        started = time.perf_counter()
        yield
        passed = time.perf_counter() - started
        spans.append(lambda: passed)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Tensors on their way from and to other ranks; none may be written, nor an arriving one read, before `wait`."""

    transfers: tuple[dist.Work, ...] = ()
    arriving: tuple[Tensor, ...] = ()
    leaving: tuple[Tensor, ...] = ()
    stopwatch: AbstractContextManager[None] | None = None

    def wait(self) -> tuple[Tensor, ...]:
        """What has arrived, once all is done. To be called once."""
        with self.stopwatch or contextlib.nullcontext():
            for transfer in self.transfers:
                transfer.wait()
        return self.arriving


@dataclass(frozen=True, kw_only=True)
class AxisGroup:
    """The ranks that this rank works with along one axis.

    `ranks` are their numbers in the plane, in the order of the group's own; `group` is None at size 1.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    ledger: Ledger

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum over the group, in place where x is contiguous. The result is bit-identical on all ranks."""
        if self.size == 1:
            return x
        x = x.contiguous()
        with self.ledger.book("all_reduce", self.axis, x):
            dist.all_reduce(x, group=self.group)
        return x

    def all_to_all(self, x: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange runs of dim 0: `send[i]` rows go to rank i, `receive[i]` rows come from it, in rank order."""
        if self.size == 1:
            return x
        x = x.contiguous()
        out = x.new_empty((sum(receive), *x.shape[1:]))
        with self.ledger.book("all_to_all", self.axis, x):
            dist.all_to_all_single(out, x, list(receive), list(send), group=self.group)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack x of every rank on a new dim 0, in rank order. Shapes must be equal."""
        if self.size == 1:
            return x.unsqueeze(0)
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        with self.ledger.book("all_gather", self.axis, x):
            gather_into(out.flatten(0, 1), x, self.group)
        return out

    def pass_on(self, x: Tensor, *, receive: int) -> Exchange:
        """Start sending x to the next rank of the ring and receiving `receive` rows of dim 0 from the one before."""
        if self.size == 1:
            return Exchange(arriving=(x,))
        out = x.new_empty((receive, *x.shape[1:]))
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self.exchange({following: x.contiguous()}, {previous: out})

    def exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> Exchange:
        """Start sending `send[i]` to rank i of the group and filling `receive[i]` from it, all at once.

        Both are contiguous. At most one tensor goes from one rank to another.
        """
        operations = []
        stopwatch = None
        # Peers are numbered over the plane, whatever the group: rank 1 of the group [2, 3] is 3.
        for rank, x in send.items():
            stopwatch = self.ledger.book("send", self.axis, x)
            operations.append(dist.P2POp(dist.isend, x, self.ranks[rank], self.group))
        for rank, out in receive.items():
            operations.append(dist.P2POp(dist.irecv, out, self.ranks[rank], self.group))
        transfers = dist.batch_isend_irecv(operations) if operations else []
        return Exchange(
            transfers=tuple(transfers),
            arriving=tuple(receive.values()),
            leaving=tuple(send.values()),
            stopwatch=stopwatch,
        )

    def send(self, x: Tensor, to: int) -> Exchange:
        """Start sending x to rank `to` of the group (not at size 1); wait before x is written again."""
        x = x.contiguous()
        stopwatch = self.ledger.book("send", self.axis, x)
        transfer = dist.isend(x, self.ranks[to], group=self.group)
        assert transfer is not None
        return Exchange(transfers=(transfer,), leaving=(x,), stopwatch=stopwatch)

    def receive(self, out: Tensor, sender: int) -> Tensor:
        """Fill `out` with what rank `sender` of the group sends."""
        dist.recv(out, self.ranks[sender], group=self.group)
        return out

    def broadcast(self, x: Tensor, sender: int) -> Tensor:
        """x of rank `sender` on every rank, in place."""
        if self.size == 1:
            return x
        sending = self.rank == sender
        with self.ledger.book("broadcast", self.axis, x) if sending else contextlib.nullcontext():
            dist.broadcast(x, self.ranks[sender], group=self.group)
        return x

    def gather_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate shards of dim 0 in rank order on every rank; rank i holds `sizes[i]` rows.

        One all-gather; shorter shards travel with rows that are dropped on arrival.
        """
        if self.size == 1:
            return x
        out = self.all_gather(pad_rows(x.contiguous(), max(sizes)))
        if len(set(sizes)) == 1:
            return out.flatten(0, 1)
        return torch.cat([part[:size] for part, size in zip(out, sizes, strict=True)])

    def reduce_scatter_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum x over the ranks and keep this rank's run of dim 0, of `sizes[rank]` rows. Inverse of `gather_rows`."""
        if self.size == 1:
            return x
        x = x.contiguous()
        if len(set(sizes)) > 1:
            x = torch.cat([pad_rows(part, max(sizes)) for part in x.split(list(sizes))])
        out = x.new_empty((max(sizes), *x.shape[1:]))
        with self.ledger.book("reduce_scatter", self.axis, x):
            scatter_sums(out, x, self.group)
        return out[: sizes[self.rank]]


def gather_into(
    out: Tensor, x: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> dist.Work | None:
    """all_gather into one tensor of the ranks' x end to end, under the name that this torch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, group=group, async_op=async_op)


def scatter_sums(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> None:
    """reduce_scatter of one tensor, under the name that this torch has for it."""
    if x.device.type == "cpu":
        # gloo's form for one tensor copies it; NCCL's form for a list does.
        dist.reduce_scatter(out, list(x.split(out.shape[0])), group=group)
        return
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, x, group=group)


def lone_rank(axis: str) -> AxisGroup:
    """A group of one: every operation is the identity."""
    return AxisGroup(axis=axis, ranks=(0,), rank=0, group=None, ledger=Ledger())


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x with zero rows appended to dim 0; x itself if it has that many."""
    if x.shape[0] == rows:
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, rows - x.shape[0]])
