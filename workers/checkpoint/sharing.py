"""Read each byte of a model file once on a machine, whichever of its ranks need it.

Ranks that hold the same take turns: one reads, the others get it by broadcast. Of a matrix that is cut by columns
every tensor-parallel rank reads some rows and hands out the columns, so that no rank passes over the whole.

All ranks of a group make the same reads in the same order. So whatever goes wrong on one of them is kept until all
come to a milestone, where they vote; until then it goes along, and hands out what it has. A rank that cannot go along,
as without memory for what it is to be sent, ends the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from comfy_wan_dist.mesh.degrees import AXES
from comfy_wan_dist.mesh.layout import REPLICATING_AXES, groups
from comfy_wan_dist.mesh.shards import shard_range
from comfy_wan_dist.model_file.encoding import TensorEntry
from workers.model.dtypes import dtype_coded
from workers.parallel.agreement import OutOfStep
from workers.parallel.collectives import AxisGroup, Ledger, lone_rank
from workers.parallel.groups import PlaneGroups

from .reader import BUFFER_BYTES, TensorReader

MILESTONES = 32
"""In every load, on every rank, whatever it reads: a stop is heard after so much of it."""

T = TypeVar("T")


class Milestone(Protocol):
    """Called `MILESTONES` times in a load: bytes done and in all, and what has gone wrong on this rank.

    It raises where the load must end, on all ranks alike.
    """

    def __call__(self, done: int, total: int, error: Exception | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ReadGroups:
    """Ranks of this machine. everyone: with this rank's stage. replicas: with its weights. peers: of its tp group.

    peers are each rank alone where a tp group reaches over several machines.
    """

    everyone: AxisGroup
    replicas: AxisGroup
    peers: AxisGroup


def build_read_groups(
    plane: PlaneGroups, *, local_ranks: int, is_whole: bool = False
) -> ReadGroups:
    """local_ranks: how many ranks are on each machine. is_whole: of a model that every rank of the plane holds whole.

    Collectives: one `new_group` for each set of ranks that was not there before.
    """

    def here(*axes: str) -> AxisGroup:
        sets = [
            tuple(ranks)
            for group in groups(plane.layout, axes)  # in ascending order
            for _, ranks in groupby(group, key=lambda rank: rank // local_ranks)
        ]
        # What a job's ledger counts is compared with its plan, which knows of no load.
        return replace(plane.axis_group("read", sets), ledger=Ledger())

    if is_whole:
        everyone = here(*AXES)
        return ReadGroups(everyone=everyone, replicas=everyone, peers=lone_rank("read"))
    peers = here("tp")
    return ReadGroups(
        everyone=here(*REPLICATING_AXES, "tp"),
        replicas=here(*REPLICATING_AXES),
        # For all of a machine's ranks or for none: the replicas of a rank that has peers must have theirs.
        peers=lone_rank("read") if local_ranks % plane.layout.tp else peers,
    )


class SharedReader:
    """A `TensorReader` for ranks that read alike. Use as a context manager.

    error: the first thing that went wrong; from then on nothing is read.
    """

    def __init__(self, groups: ReadGroups) -> None:
        self.groups = groups
        self.error: Exception | None = None
        self.alone = TensorReader()
        self._turns: Counter[tuple[int, ...]] = Counter()

    def __enter__(self) -> SharedReader:
        self.alone.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.alone.__exit__()

    @property
    def bytes_read(self) -> int:
        return self.alone.bytes_read

    def attempt(self, action: Callable[[], object]) -> None:
        """Do it unless something has gone wrong, and keep what goes wrong with it."""
        if self.error is not None:
            return
        try:
            action()
        except Exception as error:  # whatever it is: the others wait for this rank in the next read
            self.error = error

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For the reads between two milestones. What fails there outside of `attempt` is raised as OutOfStep.

        If this rank reads alone, it is kept like any other error.
        """
        try:
            yield
        except Exception as error:
            groups = (self.groups.everyone, self.groups.replicas, self.groups.peers)
            if max(group.size for group in groups) > 1:
                raise OutOfStep(
                    f"a shared load could not go on ({type(error).__name__}: {error})"
                ) from error
            self.error = self.error or error

    def read_into(
        self,
        target: Tensor,
        entry: TensorEntry,
        *,
        holders: AxisGroup,
        rows: range | None = None,
        columns: range | None = None,
        peer_columns: Sequence[range] = (),
    ) -> None:
        """As `TensorReader.read_into`, for all of `holders`, who read the same.

        peer_columns: of each tp rank, if all of them read the same rows now. Collectives: a broadcast among holders,
        an all-to-all among the tp ranks for each buffer of rows.
        """
        turn = self._turns[holders.ranks] % holders.size
        self._turns[holders.ranks] += 1
        if holders.rank == turn:
            if columns is not None and len(peer_columns) == self.groups.peers.size > 1:
                self._read_with_peers(target, entry, rows, peer_columns)
            else:
                self.attempt(
                    lambda: self.alone.read_into(target, entry, rows=rows, columns=columns)
                )
        if holders.size > 1 and target.numel():
            holders.broadcast(target.view(-1).view(torch.uint8), turn)

    def _read_with_peers(
        self, target: Tensor, entry: TensorEntry, rows: range | None, columns: Sequence[range]
    ) -> None:
        peers = self.groups.peers
        rows = range(entry.shape[0]) if rows is None else rows
        dtype = dtype_coded(entry.dtype)
        row_bytes = entry.size // entry.shape[0]
        as_bytes = replace(entry, dtype="U8", shape=(entry.shape[0], row_bytes))
        widths = [len(each) * dtype.itemsize for each in columns]
        at_once = max(peers.size, BUFFER_BYTES // row_bytes)
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            shard = shard_range(len(some), parts=peers.size, rank=peers.rank)
            own = torch.zeros(shard.size, row_bytes, dtype=torch.uint8)
            own_rows = some[shard.start : shard.stop]
            self.attempt(partial(self.alone.read_into, own, as_bytes, rows=own_rows))
            parts = [
                own[:, each.start * dtype.itemsize : each.stop * dtype.itemsize].flatten()
                for each in columns
            ]
            got = peers.all_to_all(
                torch.cat(parts).to(target.device),
                send=[shard.size * width for width in widths],
                receive=[size * widths[peers.rank] for size in shard.sizes],
            )
            target[start : start + len(some)] = got.view(dtype).view(len(some), -1)


def in_sections(items: Sequence[T], size: Callable[[T], int]) -> Iterator[tuple[list[T], int, int]]:
    """Items in `MILESTONES` runs of about the same size, maybe empty; the size done with each, and that of all."""
    total = sum(map(size, items))
    left, done = list(items), 0
    for milestone in range(1, MILESTONES + 1):
        run: list[T] = []
        while left and (done < total * milestone / MILESTONES or milestone == MILESTONES):
            run.append(left.pop(0))
            done += size(run[-1])
        yield run, done, total
