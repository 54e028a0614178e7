"""Which plane does which job, and when: one scheduler for all planes, nodes and event loops of ComfyUI's process.

A node's work comes as one or more pieces. Among waiting pieces the longest goes first, to the first of its planes
that is idle; a plane has one run at a time and takes the next when it falls idle. Where that keeps pipeline stages
busy, a run does several pieces at once: the one whose turn it is, and of those that no plane is idle for the
longest-waiting ones that may join it. There is no thread here: each piece is driven by a task in its caller's event
loop, and shared state is changed under one lock.

Covered: order, who shares a run, retry after the loss of a plane or of a shared run, interrupt and cancellation. Not
covered: the start and end of groups (registry.py), how a group runs a job (client.py), how requests are joined
(joining.py).

Source: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969 (longest processing time first is within
4/3 - 1/(3m) of the best split over m planes).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ipc.errors import (
    InsufficientMemoryError,
    MachineLost,
    WanDistError,
    WorkerDied,
    WorkerStartError,
    WorkerStopped,
    WorkerTimeout,
)
from ..ipc.messages import Done, Progress, Request, SampleRequest
from ..ipc.shared import BufferPool, Parcel
from ..mesh.devices import DeviceList
from .joining import batch_of, is_joinable
from .shared_run import Member, RunDisbanded, RunRefused, SharedRun
from .spec import GroupKey, LaunchSpec

if TYPE_CHECKING:
    from .client import WorkerGroup
    from .registry import GroupRegistry

POLL_S = 0.05
# The nodes of a graph come one after the other: wait for the next a moment, so that the first does not win by that, and
# that those which may share a run do.
SETTLE_S = 0.05
MAX_SETTLE_S = 0.5

PieceProgress = Callable[[int, Progress], None]
InterruptCheck = Callable[[], None]
LOSSES = (WorkerDied, WorkerTimeout, WorkerStartError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A request that any plane can do. `cost` is in one unit for all pieces that ever wait together.

    most_samples: how many samples a run may have in which this piece, a SampleRequest, is done together with others
    like it (joining.py); 0 if it is to be done alone.
    """

    request: Request
    cost: float
    most_samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Where a piece was done at last, what the ranks answered, and how many requests they answered by that at once."""

    plane: LaunchSpec
    answers: tuple[Done, ...]
    requests: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What the caller does meanwhile, in its own event loop.

    on_progress: gets the number of the piece too. check_interrupt: called at least every 50 ms; what it raises cancels
    all pieces of the caller. make_room: asks for memory on CUDA devices before a group starts there, and before the
    one retry of a piece that found too little.
    """

    on_progress: PieceProgress = lambda piece, progress: None
    check_interrupt: InterruptCheck = lambda: None
    make_room: Callable[[DeviceList], None] = lambda devices: None


class _Ticket:
    """A piece that waits for a plane or has one. Guarded by the scheduler's lock."""

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
        return len(self.planes) > 1 or self.may_share

    def own(self, plane: LaunchSpec) -> LaunchSpec | None:
        """The one of its planes that is as good as `plane`."""
        return next((own for own in self.planes if own.key == plane.key), None)


class _Crew:
    """The tickets of a run in the making; the first leads."""

    def __init__(self, plane: LaunchSpec, leader: _Ticket) -> None:
        self.plane = plane
        self.tickets = [leader]

    @property
    def samples(self) -> int:
        return sum(ticket.samples for ticket in self.tickets)

    def takes(self, ticket: _Ticket) -> bool:
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


class Scheduler:
    """Spreads pieces over planes. Safe from several threads and event loops."""

    def __init__(self, registry: GroupRegistry, *, settle_s: float = SETTLE_S) -> None:
        self._registry = registry
        self._settle_s = settle_s
        self._pool = BufferPool()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: list[_Ticket] = []
        self._busy: dict[_Ticket, LaunchSpec] = {}
        self._failed_starts: set[GroupKey] = set()

    def parcel(self) -> Parcel:
        """Room for the tensors of a node's pieces, which any plane can use."""
        return Parcel(self._pool)

    async def run(
        self,
        planes: Sequence[LaunchSpec],
        pieces: Sequence[Piece],
        fds: Sequence[int] = (),
        *,
        host: Host,
    ) -> tuple[Outcome, ...]:
        """Have all pieces done on any of `planes`; return their outcomes in the order of `pieces`.

        fds: the descriptors that the TensorRefs of all pieces count; they stay the caller's. When this returns or
        raises, no rank works on a piece any more.
        A piece whose plane dies, times out or does not start is done once more: on another plane, or, if there is
        none, on the same after its restart (not after a failed start). A piece that shared a run with others is done
        alone after such a loss, and after an error of the run, which may be another's; it is queued again if the one
        that led the run is cancelled. Any other error, an interrupt, and a cancellation of this coroutine cancel the
        other pieces of the call, and only them, and are raised.

        Raises what WorkerGroup.run and GroupRegistry.lease raise.
        """
        with self._lock:
            tickets = [
                _Ticket(next(self._numbers), tuple(planes), piece, tuple(fds)) for piece in pieces
            ]
        self._enter(tickets)
        tasks = [
            asyncio.create_task(self._run_piece(ticket, index, host))
            for index, ticket in enumerate(tickets)
        ]
        try:
            return tuple(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            while not all(task.done() for task in tasks):
                # A second cancellation changes nothing: the ranks still use the tensors.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(tasks)
            raise
        finally:
            # A task that is cancelled before its first step leaves its ticket.
            for ticket in tickets:
                self._leave(ticket)

    def call_off_waiting(self) -> None:
        """Make all waiting pieces raise WorkerStopped, and free idle buffers."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            pool, self._pool = self._pool, BufferPool()
        pool.close()
        for ticket in waiting:
            ticket.turn.set_exception(
                WorkerStopped("the worker groups were stopped while the job waited for one")
            )

    # ---- one piece --------------------------------------------------------------------------------

    async def _run_piece(self, ticket: _Ticket, index: int, host: Host) -> Outcome:
        was_lost = False
        while True:
            planes, is_alone = ticket.planes, True
            try:
                return await self._run_once(ticket, index, host)
            except RunDisbanded:
                is_alone = False
            except RunRefused:
                pass
            except LOSSES as error:
                planes = self._planes_for_retry(ticket, error)
                if was_lost or not planes:
                    raise
                was_lost = True
                logger.warning(
                    "job %s lost its plane and is run again: %s", ticket.piece.request.id, error
                )
            # It keeps its place in the queue. Alone after a loss, as sharing may be what took the memory.
            ticket = _Ticket(
                ticket.number, planes, ticket.piece, ticket.member.fds, is_alone=is_alone
            )
            self._enter([ticket])

    async def _run_once(self, ticket: _Ticket, index: int, host: Host) -> Outcome:
        try:
            run = await self._turn(ticket, host)
            work = self._lead if run.is_led_by(ticket.member) else self._follow
            answers = await work(run, ticket.member, index, host)
            plane = ticket.own(run.plane)
            assert plane is not None, "a run is on a plane of all its members"
            return Outcome(plane=plane, answers=answers, requests=run.requests)
        finally:
            self._leave(ticket)

    async def _lead(
        self, run: SharedRun, member: Member, index: int, host: Host
    ) -> tuple[Done, ...]:
        """Have a run done for all its members; they hear how it ended as this piece does."""

        def show(progress: Progress) -> None:
            host.on_progress(index, progress)
            run.tell(progress)

        try:
            async with self._leased(run.plane, host) as group:
                with self.parcel() as parcel:
                    request, fds = run.join(parcel)
                    answers = await self._run_on(group, request, fds, show, host)
                    if run.requests > 1:
                        assert isinstance(request, SampleRequest), "only these share runs"
                        run.hand_out(parcel.tensor(request.result), answers)
                    return answers
        except LOSSES as error:
            run.fail(error)
            raise
        except (WanDistError, OSError) as error:
            if run.requests <= 1:
                raise
            logger.warning("each of %d requests is run alone now: %s", run.requests, error)
            run.fail(RunRefused())
            raise RunRefused from error

    async def _follow(
        self, run: SharedRun, member: Member, index: int, host: Host
    ) -> tuple[Done, ...]:
        """Wait for a run that another piece leads."""
        answers = asyncio.wrap_future(member.answers)
        while True:
            is_done = answers.done()
            while member.progress:
                host.on_progress(index, member.progress.popleft())
            if is_done:
                return answers.result()
            await asyncio.wait([answers], timeout=POLL_S)
            host.check_interrupt()

    @contextlib.asynccontextmanager
    async def _leased(self, plane: LaunchSpec, host: Host) -> AsyncIterator[WorkerGroup]:
        if all(group.spec.key != plane.key for group in self._registry.running_groups()):
            host.make_room(plane.used_devices)
        async with contextlib.AsyncExitStack() as stack:
            lease = self._registry.lease(plane, check_interrupt=host.check_interrupt)
            try:
                group = await stack.enter_async_context(lease)
            except WorkerStartError:
                with self._lock:
                    self._failed_starts.add(plane.key)
                raise
            with self._lock:
                self._failed_starts.discard(plane.key)
            yield group

    async def _run_on(
        self,
        group: WorkerGroup,
        request: Request,
        fds: tuple[int, ...],
        on_progress: Callable[[Progress], None],
        host: Host,
    ) -> tuple[Done, ...]:
        async def run() -> tuple[Done, ...]:
            return await group.run(
                request, fds, on_progress=on_progress, check_interrupt=host.check_interrupt
            )

        try:
            return await run()
        except InsufficientMemoryError:
            if group.spec.devices.kind != "cuda":
                raise
        host.make_room(group.spec.used_devices)
        return await run()

    async def _turn(self, ticket: _Ticket, host: Host) -> SharedRun:
        """Wait for a plane, or for a place in another's run."""
        turn = asyncio.wrap_future(ticket.turn)
        while not turn.done():
            # Not wait_for: before Python 3.12 it forgets a cancellation that comes together with the turn.
            await asyncio.wait([turn], timeout=POLL_S)
            host.check_interrupt()
            self._dispatch()
        return turn.result()

    def _planes_for_retry(self, ticket: _Ticket, error: Exception) -> tuple[LaunchSpec, ...]:
        """Where a piece that lost its plane may go; nowhere if the loss was wanted or would come again."""
        if isinstance(error, WorkerStopped | MachineLost):
            return ()
        lost = ticket.turn.result().plane.key
        others = tuple(plane for plane in ticket.planes if plane.key != lost)
        if not isinstance(error, WorkerStartError):
            return others or ticket.planes
        with self._lock:
            return tuple(plane for plane in others if plane.key not in self._failed_starts)

    # ---- the queue --------------------------------------------------------------------------------

    def _enter(self, tickets: Sequence[_Ticket]) -> None:
        """Queue tickets, all at once so that the first is not preferred."""
        with self._lock:
            self._waiting += tickets
        self._dispatch()

    def _leave(self, ticket: _Ticket) -> None:
        """Give the ticket's plane or place in the queue or in a run back; may be called again."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            has_run = ticket.turn.done() and ticket.turn.exception() is None
        if has_run:
            ticket.turn.result().leave(ticket.member)
        with self._lock:
            self._busy.pop(ticket, None)
        self._dispatch()

    def _dispatch(self) -> None:
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
                    crews.append(_Crew(plane, ticket))
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
