"""Has pieces done: one scheduler for all planes, nodes and event loops of ComfyUI's process.

A node's work comes as one or more pieces; queue.py says which plane does which. There is no thread here: each piece is
driven by a task in its caller's event loop.

Covered: retry after the loss of a plane or of a shared run, interrupt and cancellation. Not covered: the start and end
of groups (registry.py), how a group runs a job (client.py), how requests are joined (shared_run.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..ipc.errors import (
    MachineLost,
    WanDistError,
    WorkerDied,
    WorkerStartError,
    WorkerStopped,
    WorkerTimeout,
)
from ..ipc.messages import Done, Progress, SampleRequest
from ..ipc.shared import BufferPool, KeptTensor, Parcel
from .client import WorkerGroup
from .queue import SETTLE_S, Piece, PlaneQueue, Ticket
from .registry import GroupRegistry
from .shared_run import Member, RunDisbanded, RunRefused, SharedRun
from .spec import GroupKey, LaunchSpec
from .waiting import InterruptCheck, attended, ignore

PieceProgress = Callable[[int, Progress], None]
LOSSES = (WorkerDied, WorkerTimeout, WorkerStartError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Where a piece was done at last, what the ranks answered, and how many requests they answered by that at once."""

    plane: LaunchSpec
    answers: tuple[Done, ...]
    requests: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Whoever has pieces done, and what it does meanwhile in its own event loop.

    on_progress: gets the number of the piece too. check_interrupt: called at least every 50 ms; what it raises cancels
    all pieces of the caller.
    """

    on_progress: PieceProgress = lambda piece, progress: None
    check_interrupt: InterruptCheck = ignore


class Scheduler:
    """Spreads pieces over planes. Safe from several threads and event loops."""

    def __init__(self, groups: GroupRegistry, *, settle_s: float = SETTLE_S) -> None:
        self._groups = groups
        self._queue = PlaneQueue(settle_s=settle_s)
        self._pool = BufferPool()
        self._lock = threading.Lock()
        self._failed_starts: set[GroupKey] = set()

    def parcel(self) -> Parcel:
        """Room for the tensors of a node's pieces, which any plane can use."""
        return Parcel(self._pool)

    def keep(self, tensor: Tensor) -> KeptTensor:
        """A copy of a tensor to lend to parcels, which any plane can use."""
        return self._pool.keep(tensor)

    async def run(
        self,
        planes: Sequence[LaunchSpec],
        pieces: Sequence[Piece],
        fds: Sequence[int] = (),
        *,
        caller: Caller,
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
        tickets = self._queue.tickets(planes, pieces, fds)
        self._queue.enter(tickets)
        tasks = [
            asyncio.create_task(self._run_piece(ticket, index, caller))
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
                self._queue.leave(ticket)

    def call_off_waiting(self) -> None:
        """Make all waiting pieces raise WorkerStopped, and free idle buffers."""
        self._queue.call_off_waiting()
        with self._lock:
            pool, self._pool = self._pool, BufferPool()
        pool.close()

    # ---- one piece --------------------------------------------------------------------------------

    async def _run_piece(self, ticket: Ticket, index: int, caller: Caller) -> Outcome:
        was_lost = False
        while True:
            planes, is_alone = ticket.planes, True
            try:
                return await self._run_once(ticket, index, caller)
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
            ticket = Ticket(
                ticket.number, planes, ticket.piece, ticket.member.fds, is_alone=is_alone
            )
            self._queue.enter([ticket])

    async def _run_once(self, ticket: Ticket, index: int, caller: Caller) -> Outcome:
        try:
            run = await self._turn(ticket, caller)
            work = self._lead if run.is_led_by(ticket.member) else self._follow
            answers = await work(run, ticket.member, index, caller)
            plane = ticket.own(run.plane)
            assert plane is not None, "a run is on a plane of all its members"
            return Outcome(plane=plane, answers=answers, requests=run.requests)
        finally:
            self._queue.leave(ticket)

    async def _lead(
        self, run: SharedRun, member: Member, index: int, caller: Caller
    ) -> tuple[Done, ...]:
        """Have a run done for all its members; they hear how it ended as this piece does."""

        def show(progress: Progress) -> None:
            caller.on_progress(index, progress)
            run.tell(progress)

        try:
            async with self._leased(run.plane, caller) as group:
                with self.parcel() as parcel:
                    request, fds = run.join(parcel)
                    answers = await group.run(
                        request, fds, on_progress=show, check_interrupt=caller.check_interrupt
                    )
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
        self, run: SharedRun, member: Member, index: int, caller: Caller
    ) -> tuple[Done, ...]:
        """Wait for a run that another piece leads."""

        def attend() -> None:
            while member.progress:
                caller.on_progress(index, member.progress.popleft())
            caller.check_interrupt()

        return await attended(member.answers, attend)

    @contextlib.asynccontextmanager
    async def _leased(self, plane: LaunchSpec, caller: Caller) -> AsyncIterator[WorkerGroup]:
        async with contextlib.AsyncExitStack() as stack:
            lease = self._groups.lease(plane, check_interrupt=caller.check_interrupt)
            try:
                group = await stack.enter_async_context(lease)
            except WorkerStartError:
                with self._lock:
                    self._failed_starts.add(plane.key)
                raise
            with self._lock:
                self._failed_starts.discard(plane.key)
            yield group

    async def _turn(self, ticket: Ticket, caller: Caller) -> SharedRun:
        """Wait for a plane, or for a place in another's run."""

        def attend() -> None:
            caller.check_interrupt()
            self._queue.dispatch()

        return await attended(ticket.turn, attend)

    def _planes_for_retry(self, ticket: Ticket, error: Exception) -> tuple[LaunchSpec, ...]:
        """Where a piece that lost its plane may go; nowhere if the loss was wanted or would come again."""
        if isinstance(error, WorkerStopped | MachineLost):
            return ()
        lost = ticket.turn.result().plane.key
        others = tuple(plane for plane in ticket.planes if plane.key != lost)
        if not isinstance(error, WorkerStartError):
            return others or ticket.planes
        with self._lock:
            return tuple(plane for plane in others if plane.key not in self._failed_starts)
