"""One vote of all ranks, so that no rank enters a collective that another one will not reach.

Covered: an error that only some ranks see, the decision to stop, a number that each rank has a say
in, and the end of a job. All are the same collective (one all-reduce of four int64 on the CPU), so
a rank that failed can join whatever vote its peers are at and be heard there. Not covered: a rank
that is stuck or dead; the first needs the client's deadline, the second makes the vote raise.

Only tensors of fixed size travel; nothing is pickled.
"""

from __future__ import annotations

import struct
import traceback
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from comfy_wan_dist.ipc.errors import CONFIG_ERRORS, JobCancelled, RemoteError, error_name

REPORT_BYTES = 32 * 2**10
"""Bytes of one failure report: class name, message and traceback, each UTF-8 and cut to fit."""

_NAME_BYTES, _MESSAGE_BYTES = 128, 8 * 2**10
_TRACEBACK_BYTES = REPORT_BYTES - _NAME_BYTES - _MESSAGE_BYTES
_REPORT = struct.Struct(f"{_NAME_BYTES}s{_MESSAGE_BYTES}s{_TRACEBACK_BYTES}s")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFailure:
    """A failure that every rank knows of.

    `error` is what this rank's vote raised; the rest is of the rank that failed first.
    """

    error: Exception
    rank: int
    name: str
    message: str
    traceback: str


class OutOfStep(Exception):
    """What went wrong has left other ranks in a collective that this one will not join, so that no vote can follow."""


class _Vote(IntEnum):
    """What a rank votes on. Ranks that vote on different things have run apart."""

    ERROR = 0
    STOP = 1
    END = 2
    LEAST = 3


class Agreement:
    """The votes of one rank. Every rank of the group must call them in the same order.

    `group` is a gloo group over all ranks in the order of the world, or None at size 1, where every
    vote is this rank's own.
    """

    def __init__(self, *, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        if (size > 1) != (group is not None):
            raise ValueError(
                f"{size} ranks {'without' if group is None else 'with'} a group; "
                "give one from 2 ranks on"
            )
        self._rank = rank
        self._size = size
        self._group = group
        self._failure: SharedFailure | None = None

    def take_failure(self) -> SharedFailure | None:
        """The failure that the last vote raised, once: its frames hold tensors."""
        failure, self._failure = self._failure, None
        return failure

    def agree(self, error: Exception | None) -> None:
        """Tell the others how a local phase went, and hear how theirs did.

        Returns if no rank failed. Otherwise raises the same class on every rank: a class of
        CONFIG_ERRORS, JobCancelled, or RemoteError for anything else; an error goes before
        JobCancelled, then the lowest rank's counts. Collectives: one all-reduce; after a failure
        one broadcast.
        """
        self._vote(_Vote.ERROR, error, number=0, timeout_s=None)

    def agree_stop(self, stop: bool) -> bool:
        """Whether any rank wants to stop. Raises as `agree` does if a rank failed meanwhile."""
        return self._vote(_Vote.STOP, None, number=-int(stop), timeout_s=None) < 0

    def agree_least(self, number: int) -> int:
        """The least of the ranks' numbers, below 2**63. Raises as `agree` does if a rank failed meanwhile."""
        return self._vote(_Vote.LEAST, None, number=number, timeout_s=None)

    def agree_end(self, error: Exception | None, *, timeout_s: float | None) -> None:
        """`agree` at the end of a job, for ranks that finished and those that raised unvoted.

        Raises RuntimeError if a rank has not voted within `timeout_s` (None: the group's own
        limit).
        """
        self._vote(_Vote.END, error, number=0, timeout_s=timeout_s)

    def _vote(
        self, vote: _Vote, error: Exception | None, *, number: int, timeout_s: float | None
    ) -> int:
        """The least `number`."""
        # The smallest key names the rank whose error counts: real errors, then cancellations, then
        # none.
        none = 2 * self._size
        key = none
        # What an earlier vote raised is on all ranks, and stays the error of the rank that had it.
        earlier = self._failure if self._failure and self._failure.error is error else None
        if error is not None:
            rank = self._rank if earlier is None else earlier.rank
            key = rank + self._size * isinstance(error, JobCancelled)
        ballot = torch.tensor([key, number, vote, -vote], dtype=torch.int64, device="cpu")
        if self._group is not None:
            work = dist.all_reduce(ballot, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
            assert work is not None, "every rank of the group votes"
            work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))
        lowest_key, least, lowest_vote, highest_vote = ballot.tolist()
        if lowest_key < none:
            self._failure = self._share_failure(lowest_key % self._size, error, earlier)
            raise self._failure.error
        if lowest_vote != -highest_vote:
            raise RuntimeError(
                f"the ranks have run apart: rank {self._rank} votes on {vote.name}, another on "
                f"{_Vote(lowest_vote).name if lowest_vote != vote else _Vote(-highest_vote).name}"
            )
        return int(least)

    def _share_failure(
        self, failed_rank: int, error: Exception | None, earlier: SharedFailure | None
    ) -> SharedFailure:
        packed = bytes(REPORT_BYTES)
        if failed_rank == self._rank:
            assert error is not None, "only a rank with an error votes its own number"
            packed = _pack_report(error, earlier)
        report = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        if self._group is not None:
            dist.broadcast(report, src=failed_rank, group=self._group)
        name, message, trace = _unpack_report(bytes(report.tolist()))
        shared: Exception
        known = (*CONFIG_ERRORS.values(), JobCancelled)
        if failed_rank == self._rank and error is not None and isinstance(error, known):
            shared = error
        elif name in CONFIG_ERRORS:
            shared = CONFIG_ERRORS[name](message)
        elif name == JobCancelled.__name__:
            shared = JobCancelled(message)
        else:
            shared = RemoteError(
                f"rank {failed_rank}: {name}: {message}", rank=failed_rank, traceback=trace
            )
            if failed_rank == self._rank and error is not None:
                shared.__cause__ = error if earlier is None else error.__cause__
        return SharedFailure(
            error=shared, rank=failed_rank, name=name, message=message, traceback=trace
        )


def _pack_report(error: Exception, earlier: SharedFailure | None = None) -> bytes:
    if earlier is None:
        name, message = error_name(error), str(error)
        trace = "".join(traceback.format_exception(error))
    else:
        name, message, trace = earlier.name, earlier.message, earlier.traceback
    # Padded with zeros or cut to fit; of a traceback the end says most.
    return _REPORT.pack(
        name.encode(),
        message.encode(errors="backslashreplace"),
        trace.encode(errors="backslashreplace")[-_TRACEBACK_BYTES:],
    )


def _unpack_report(report: bytes) -> tuple[str, str, str]:
    name, message, trace = (
        text.rstrip(b"\0").decode(errors="ignore") for text in _REPORT.unpack(report)
    )
    return name, message, trace
