"""Has pieces done: one scheduler for all planes, nodes and event loops of ComfyUI's process.

A node's work comes as one or more pieces; queue.py says which plane does which. There is no thread here: each piece is
driven by a task in its caller's event loop.

Covered: retry after the loss of a plane or of a shared run, and cancellation. Not covered: the start and end of groups
(registry.py), how a group runs a job (client.py), how requests are joined (shared_run.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
from .waiting import ProgressCallback, attended

PieceProgress = Callable[[int, Progress], None]
"""Gets the number of the piece too."""
LOSSES = (WorkerDied, WorkerTimeout, WorkerStartError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Where a piece was done at last, what the ranks answered, and how many requests they answered by that at once."""

    plane: LaunchSpec
    answers: tuple[Done, ...]
    requests: int = 1


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
        on_progress: PieceProgress = lambda piece, progress: None,
    ) -> tuple[Outcome, ...]:
        """Have all pieces done on any of `planes`; return their outcomes in the order of `pieces`.

        fds: the descriptors that the TensorRefs of all pieces count; they stay the caller's. When this returns or
        raises, no rank works on a piece any more.
        A piece whose plane dies, times out or does not start is done once more: on another plane, or, if there is
        none, on the same after its restart (not after a failed start). A piece that shared a run with others is done
        alone after such a loss, and after an error of the run, which may be another's; it is queued again if the one
        that led the run is cancelled. Any other error, what on_progress raises, and a cancellation of this coroutine
        cancel the other pieces of the call, and only them, and are raised.

        Raises what WorkerGroup.run and GroupRegistry.lease raise.
        """
        tickets = self._queue.tickets(planes, pieces, fds)
        self._queue.enter(tickets)
        tasks = [
            asyncio.create_task(self._run_piece(ticket, partial(on_progress, index)))
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

    async def _run_piece(self, ticket: Ticket, on_progress: ProgressCallback) -> Outcome:
        was_lost = False
        while True:
            planes, is_alone = ticket.planes, True
            try:
                return await self._run_once(ticket, on_progress)
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

    async def _run_once(self, ticket: Ticket, on_progress: ProgressCallback) -> Outcome:
        try:
            # For a plane, or for a place in another's run.
            run = await attended(ticket.turn, self._queue.dispatch)
            work = self._lead if run.is_led_by(ticket.member) else self._follow
            answers = await work(run, ticket.member, on_progress)
            plane = ticket.own(run.plane)
            assert plane is not None, "a run is on a plane of all its members"
            return Outcome(plane=plane, answers=answers, requests=run.requests)
        finally:
            self._queue.leave(ticket)

    async def _lead(
        self, run: SharedRun, member: Member, on_progress: ProgressCallback
    ) -> tuple[Done, ...]:
        """Have a run done for all its members; they hear how it ended as this piece does."""

        def show(progress: Progress) -> None:
            on_progress(progress)
            run.tell(progress)

        try:
            async with self._leased(run.plane) as group:
                with self.parcel() as parcel:
                    request, fds = run.join(parcel)
                    answers = await group.run(request, fds, on_progress=show)
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
        self, run: SharedRun, member: Member, on_progress: ProgressCallback
    ) -> tuple[Done, ...]:
        """Wait for a run that another piece leads."""

        def attend() -> None:
            while member.progress:
                on_progress(member.progress.popleft())

        return await attended(member.answers, attend)

    @contextlib.asynccontextmanager
    async def _leased(self, plane: LaunchSpec) -> AsyncIterator[WorkerGroup]:
        async with contextlib.AsyncExitStack() as stack:
            lease = self._groups.lease(plane)
            try:
                group = await stack.enter_async_context(lease)
            except WorkerStartError:
                with self._lock:
                    self._failed_starts.add(plane.key)
                raise
            with self._lock:
                self._failed_starts.discard(plane.key)
            yield group

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
