"""The queue of all planes: which piece gets which plane, and which pieces share a run.

Among waiting pieces the longest goes first, to the first of its planes that is idle; a plane has one run at a time and
takes the next when it falls idle. Where that keeps pipeline stages busy, a run does several pieces at once: the one
whose turn it is, and of those that no plane is idle for the longest-waiting ones that may join it. No event loop and no
thread: whoever waits calls `dispatch` now and then.

Source: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969 (longest processing time first is within
4/3 - 1/(3m) of the best split over m planes).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ..ipc.errors import WorkerStopped
from ..ipc.messages import Request, SampleRequest
from .shared_run import Member, SharedRun, batch_of, is_joinable
from .spec import LaunchSpec

# The nodes of a graph come one after the other: wait for the next a moment, so that the first does not win by that, and
# that those which may share a run do.
SETTLE_S = 0.05
MAX_SETTLE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A request that any plane can do. `cost` is in one unit for all pieces that ever wait together.

    most_samples: how many samples a run may have in which this piece, a SampleRequest, is done together with others
    like it (shared_run.py); 0 if it is to be done alone.
    is_one_of_many: its caller asks for one after the other, so that each wait for others would add up.
    """

    request: Request
    cost: float
    most_samples: int = 0
    is_one_of_many: bool = False


class Ticket:
    """A piece that waits for a plane or has one. Guarded by the queue's lock."""

    def __init__(
        self,
        number: int,
        planes: tuple[LaunchSpec, ...],
        piece: Piece,
        fds: tuple[int, ...],
        *,
        is_alone: bool = False,
    ) -> None:
        self.number = number
        self.planes = planes
        self.piece = piece
        self.member = Member(piece.request, fds)
        self.is_alone = is_alone
        self.since = time.monotonic()
        self.turn: Future[SharedRun] = Future()

    @property
    def samples(self) -> int:
        request = self.piece.request
        return batch_of(request) if isinstance(request, SampleRequest) else 0

    @property
    def may_share(self) -> bool:
        return not self.is_alone and 0 < self.samples < self.piece.most_samples

    @property
    def is_patient(self) -> bool:
        """Whether it matters who comes a moment later. On one plane the order costs nothing."""
        return not self.piece.is_one_of_many and (len(self.planes) > 1 or self.may_share)

    def own(self, plane: LaunchSpec) -> LaunchSpec | None:
        """The one of its planes that is as good as `plane`."""
        return next((own for own in self.planes if own.key == plane.key), None)


class Crew:
    """The tickets of a run in the making; the first leads."""

    def __init__(self, plane: LaunchSpec, leader: Ticket) -> None:
        self.plane = plane
        self.tickets = [leader]

    @property
    def samples(self) -> int:
        return sum(ticket.samples for ticket in self.tickets)

    def takes(self, ticket: Ticket) -> bool:
        leader = self.tickets[0]
        most = min(member.piece.most_samples for member in (*self.tickets, ticket))
        return (
            leader.may_share
            and ticket.may_share
            and self.samples + ticket.samples <= most
            and ticket.own(self.plane) is not None
            and is_joinable(leader.piece.request, ticket.piece.request)
        )

    def begin(self) -> None:
        run = SharedRun(self.plane, [ticket.member for ticket in self.tickets])
        for ticket in self.tickets:
            ticket.turn.set_result(run)


class PlaneQueue:
    """Tickets that wait, and those that have a plane. Safe from several threads."""

    def __init__(self, *, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: list[Ticket] = []
        self._busy: dict[Ticket, LaunchSpec] = {}

    def tickets(
        self, planes: Sequence[LaunchSpec], pieces: Sequence[Piece], fds: Sequence[int]
    ) -> list[Ticket]:
        """Tickets for the pieces, not yet queued. fds: those that the TensorRefs of all pieces count."""
        with self._lock:
            return [
                Ticket(next(self._numbers), tuple(planes), piece, tuple(fds)) for piece in pieces
            ]

    def call_off_waiting(self) -> None:
        """Make all waiting pieces raise WorkerStopped."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            ticket.turn.set_exception(
                WorkerStopped("the worker groups were stopped while the job waited for one")
            )

    def enter(self, tickets: Sequence[Ticket]) -> None:
        """Queue tickets, all at once so that the first is not preferred."""
        with self._lock:
            self._waiting += tickets
        self.dispatch()

    def leave(self, ticket: Ticket) -> None:
        """Give the ticket's plane or place in the queue or in a run back; may be called again."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            has_run = ticket.turn.done() and ticket.turn.exception() is None
        if has_run:
            ticket.turn.result().leave(ticket.member)
        with self._lock:
            self._busy.pop(ticket, None)
        self.dispatch()

    def dispatch(self) -> None:
        """Give idle planes to waiting pieces, and let others that would have to wait join them."""
        with self._lock:
            is_settled = self._is_settled()
            crews = []
            for ticket in sorted(
                self._waiting, key=lambda ticket: (-ticket.piece.cost, ticket.number)
            ):
                plane = next((plane for plane in ticket.planes if self._is_idle(plane)), None)
                if plane is not None and (is_settled or not ticket.is_patient):
                    self._waiting.remove(ticket)
                    self._busy[ticket] = plane
                    crews.append(Crew(plane, ticket))
            for ticket in sorted(self._waiting, key=lambda ticket: ticket.number):
                takers = [crew for crew in crews if crew.takes(ticket)]
                if takers:
                    self._waiting.remove(ticket)
                    min(takers, key=lambda crew: crew.samples).tickets.append(ticket)
            for crew in crews:
                crew.begin()

    def _is_idle(self, plane: LaunchSpec) -> bool:
        return not any(plane.shares_devices_with(busy) for busy in self._busy.values())

    def _is_settled(self) -> bool:
        """Whether no patient piece has come just now."""
        now = time.monotonic()
        since = [ticket.since for ticket in self._waiting if ticket.is_patient]
        return not since or now - max(since) >= self._settle_s or now - min(since) >= MAX_SETTLE_S
