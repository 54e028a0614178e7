"""Which plane does which job, and when: one scheduler for all planes, nodes and event loops of ComfyUI's process.

A node's work comes as one or more pieces. Among waiting pieces the longest goes first, to the first of its planes
that is idle; a plane has one piece at a time and takes the next when it falls idle. There is no thread here: each
piece is driven by a task in its caller's event loop, and shared state is changed under one lock.

Covered: order, retry after the loss of a plane, interrupt and cancellation. Not covered: the start and end of groups
(registry.py), and how a group runs a job (client.py).

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ipc.errors import (
    InsufficientMemoryError,
    MachineLost,
    WorkerDied,
    WorkerStartError,
    WorkerStopped,
    WorkerTimeout,
)
from ..ipc.messages import Done, Progress, Request
from ..ipc.shared import BufferPool, Parcel
from ..mesh.devices import DeviceList
from .spec import GroupKey, LaunchSpec

if TYPE_CHECKING:
    from .registry import GroupRegistry

POLL_S = 0.05
# The nodes of a graph come one after the other: wait for the next a moment, so that the first does not win by that.
SETTLE_S = 0.05
MAX_SETTLE_S = 0.5

PieceProgress = Callable[[int, Progress], None]
InterruptCheck = Callable[[], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A request that any plane can do. `cost` is in one unit for all pieces that ever wait together."""

    request: Request
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Where a piece was done at last, and what the ranks answered."""

    plane: LaunchSpec
    answers: tuple[Done, ...]


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

    def __init__(self, number: int, planes: tuple[LaunchSpec, ...], cost: float) -> None:
        self.number = number
        self.planes = planes
        self.cost = cost
        self.since = time.monotonic()
        self.turn: Future[LaunchSpec] = Future()


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
        none, on the same after its restart (not after a failed start). Any other error, an interrupt, and a
        cancellation of this coroutine cancel the other pieces of the call, and only them, and are raised.

        Raises what WorkerGroup.run and GroupRegistry.lease raise.
        """
        tickets = self._enter([(tuple(planes), piece.cost) for piece in pieces])
        tasks = [
            asyncio.create_task(self._run_piece(ticket, index, piece.request, tuple(fds), host))
            for index, (ticket, piece) in enumerate(zip(tickets, pieces, strict=True))
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
            for (
                ticket
            ) in tickets:  # a task that is cancelled before its first step leaves its ticket
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

    async def _run_piece(
        self, ticket: _Ticket, index: int, request: Request, fds: tuple[int, ...], host: Host
    ) -> Outcome:
        try:
            return await self._run_once(ticket, index, request, fds, host)
        except (WorkerDied, WorkerTimeout, WorkerStartError) as error:
            planes = self._planes_for_retry(ticket, error)
            if not planes:
                raise
            logger.warning("job %s lost its plane and is run again: %s", request.id, error)
        (again,) = self._enter([(planes, ticket.cost)])
        return await self._run_once(again, index, request, fds, host)

    async def _run_once(
        self, ticket: _Ticket, index: int, request: Request, fds: tuple[int, ...], host: Host
    ) -> Outcome:
        try:
            plane = await self._turn(ticket, host)
            answers = await self._run_on(plane, index, request, fds, host)
            return Outcome(plane=plane, answers=answers)
        finally:
            self._leave(ticket)

    async def _run_on(
        self, plane: LaunchSpec, index: int, request: Request, fds: tuple[int, ...], host: Host
    ) -> tuple[Done, ...]:
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

            async def run() -> tuple[Done, ...]:
                return await group.run(
                    request,
                    fds,
                    on_progress=lambda progress: host.on_progress(index, progress),
                    check_interrupt=host.check_interrupt,
                )

            try:
                return await run()
            except InsufficientMemoryError:
                if plane.devices.kind != "cuda":
                    raise
            host.make_room(plane.used_devices)
            return await run()

    async def _turn(self, ticket: _Ticket, host: Host) -> LaunchSpec:
        """Wait for a plane."""
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
        lost = ticket.turn.result().key
        others = tuple(plane for plane in ticket.planes if plane.key != lost)
        if not isinstance(error, WorkerStartError):
            return others or ticket.planes
        with self._lock:
            return tuple(plane for plane in others if plane.key not in self._failed_starts)

    # ---- the queue --------------------------------------------------------------------------------

    def _enter(self, wanted: Sequence[tuple[tuple[LaunchSpec, ...], float]]) -> list[_Ticket]:
        """Queue tickets for planes and costs, all at once so that the first is not preferred."""
        with self._lock:
            tickets = [_Ticket(next(self._numbers), planes, cost) for planes, cost in wanted]
            self._waiting += tickets
        self._dispatch()
        return tickets

    def _leave(self, ticket: _Ticket) -> None:
        """Give the ticket's plane or place in the queue back; may be called again."""
        with self._lock:
            self._busy.pop(ticket, None)
            if ticket in self._waiting:
                self._waiting.remove(ticket)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give idle planes to waiting pieces."""
        with self._lock:
            is_settled = self._is_settled()
            for ticket in sorted(self._waiting, key=lambda ticket: (-ticket.cost, ticket.number)):
                plane = next((plane for plane in ticket.planes if self._is_idle(plane)), None)
                if plane is not None and (is_settled or len(ticket.planes) == 1):
                    self._waiting.remove(ticket)
                    self._busy[ticket] = plane
                    ticket.turn.set_result(plane)

    def _is_idle(self, plane: LaunchSpec) -> bool:
        return not any(plane.shares_devices_with(busy) for busy in self._busy.values())

    def _is_settled(self) -> bool:
        """Whether no piece with a choice of planes has come just now. On one plane the order costs nothing."""
        now = time.monotonic()
        since = [ticket.since for ticket in self._waiting if len(ticket.planes) > 1]
        return not since or now - max(since) >= self._settle_s or now - min(since) >= MAX_SETTLE_S
