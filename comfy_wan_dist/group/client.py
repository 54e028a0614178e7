"""A ready worker group: hands requests to its ranks, hears them, and ends them.

One thread of the group alone touches the sockets, so that every rank gets all messages in the same order. Requests are
done one at a time, in the order in which they were submitted. Callers wait in an event loop of their own, and
`on_progress` is called there.

Covered: results, errors by class, cancellation, death of ranks or launcher, the end of the group. Not covered: why a
process died (last_words.py), starting another group (registry.py).
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from ..ipc.channel import ChannelClosed, ChannelCut
from ..ipc.errors import (
    CONFIG_ERRORS,
    JobCancelled,
    ProtocolError,
    RemoteError,
    WanDistError,
    WorkerDied,
    WorkerStopped,
    WorkerTimeout,
)
from ..ipc.messages import Cancel, Done, Failed, Message, Progress, Request, encode
from .last_words import LastWords
from .launch import RunningProcesses
from .machines.door import MachineConnection
from .process import ProcessHandle
from .spec import LaunchSpec
from .waiting import ProgressCallback, attended, outlast

SEND_TIMEOUT_S = 30.0
CANCEL_TIMEOUT_S = 60.0
SHUTDOWN_GRACE_S = 5.0
DEATH_SETTLE_S = 3.0

logger = logging.getLogger(__name__)


class GroupJob:
    """A request on its way. The group's thread fills it, its caller waits on `future`."""

    def __init__(self, request: Request, fds: Sequence[int]) -> None:
        self.request = request
        self.fds = tuple(fds)
        self.future: Future[tuple[Done, ...]] = Future()
        self.progress: deque[Progress] = deque()
        self.answers: dict[int, Done | Failed] = {}
        self.is_cancelled = False
        self.cancel_deadline: float | None = None


class WorkerGroup:
    """One running plane, from when it is ready until nothing of it is left.

    Safe from several threads and event loops.
    """

    def __init__(self, processes: RunningProcesses) -> None:
        self._processes = processes
        self._last_words = LastWords(processes)
        self._lock = threading.Lock()
        self._pending: deque[GroupJob] = deque()
        self._current: GroupJob | None = None
        self._is_ending = False
        self._stop_grace_s: float | None = None  # once it is told to end
        self._ended = threading.Event()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, name="worker-group", daemon=True).start()

    # ---- callers' side ----------------------------------------------------------------------------

    @property
    def spec(self) -> LaunchSpec:
        return self._processes.spec

    @property
    def pids(self) -> tuple[int, ...]:
        """Launcher first, then this machine's ranks in their order."""
        ranks = sorted(self._processes.ranks.items())
        local = [connection.pid for _, connection in ranks if connection.process is not None]
        return self._processes.launcher.pid, *local

    @property
    def is_alive(self) -> bool:
        """Whether the group takes jobs. It may still die before one is sent."""
        return not self._is_ending

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the group is left."""
        return self._ended.is_set()

    async def run(
        self,
        request: Request,
        fds: Sequence[int] = (),
        *,
        on_progress: ProgressCallback = lambda progress: None,
    ) -> tuple[Done, ...]:
        """Have `request` done; return the ranks' answers in their order. Leaves the loop free.

        fds: the descriptors that the request's TensorRefs count; they stay the caller's.
        on_progress: called here; what it raises, and a cancellation of this coroutine, cancels the
        job on all ranks and is raised once all of them have stopped.

        Raises ConfigError for a request that cannot travel; a class of CONFIG_ERRORS, JobCancelled
        or RemoteError for what the ranks raised, after which the group lives on; WorkerDied,
        WorkerStopped or WorkerTimeout if the group has ended.
        """
        job = self._submit(request, fds)

        def attend() -> None:
            while job.progress:
                on_progress(job.progress.popleft())

        try:
            return await attended(job.future, attend)
        except BaseException:
            self._cancel(job)
            await outlast(job.future.done)
            raise

    def stop(self, *, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """End the group and wait until nothing of it is left. Its jobs raise WorkerStopped.

        grace_s: how long the ranks may take to end by themselves. May be called twice, and after a
        death.
        """
        self.begin_stop(grace_s=grace_s)
        self._ended.wait()

    def begin_stop(self, *, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """`stop` without the wait."""
        with self._lock:
            if not self._is_ending:
                self._is_ending = True
                self._stop_grace_s = grace_s
                self._wake()

    def _submit(self, request: Request, fds: Sequence[int]) -> GroupJob:
        encode(request)  # here, where a number that cannot travel harms nobody but its job
        job = GroupJob(request, fds)
        with self._lock:
            if self._is_ending:
                kind = WorkerDied if self._stop_grace_s is None else WorkerStopped
                raise kind("the worker group has ended; run the job again to start a fresh one")
            self._pending.append(job)
            self._wake()
        return job

    def _cancel(self, job: GroupJob) -> None:
        with self._lock:
            job.is_cancelled = True
            waiting = job in self._pending
            if waiting:
                self._pending.remove(job)
            self._wake()
        if waiting:
            job.future.set_exception(JobCancelled("the job was cancelled before it began"))

    def _wake(self) -> None:
        """Have the thread look around. Under the lock: a closed descriptor's number may soon be another file."""
        if not self._ended.is_set():
            os.eventfd_write(self._wakes, 1)

    # ---- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        reason: WanDistError
        is_death = True
        try:
            self._serve()
            reason = WorkerStopped("the worker group was stopped before the job was done")
            is_death = False
        except WanDistError as error:
            reason = self._last_words.added_to(error)
        except Exception as error:
            logger.exception("the worker group's thread failed; ending the group")
            reason = WorkerDied(f"the worker group's thread failed: {error!r}")
        with self._lock:
            self._is_ending = True
        try:
            if is_death:
                self._processes.end(settle_s=DEATH_SETTLE_S)
                reason = self._with_log(reason)
                logger.error("worker group %s: %s", self.spec.degrees, reason)
            else:
                self._processes.end(grace_s=self._stop_grace_s or 0.0)
        finally:
            self._finish(reason)

    def _with_log(self, reason: WanDistError) -> WanDistError:
        log = self._processes.log
        more = f"\nMore may be in {log.path}." if self._last_words.is_explained else log.quoted()
        return type(reason)(f"{reason}{more}")

    def _finish(self, reason: WanDistError) -> None:
        with self._lock:
            jobs = [*([self._current] if self._current else []), *self._pending]
            self._current = None
            self._pending.clear()
            self._ended.set()
            os.close(self._wakes)
        for job in jobs:
            job.future.set_exception(reason)

    def _serve(self) -> None:
        """Pass messages until the group is told to end; raises why it must end before."""
        with selectors.DefaultSelector() as selector:
            listen = partial(selector.register, events=selectors.EVENT_READ)
            listen(self._wakes, data=lambda: os.eventfd_read(self._wakes))
            listen(self._processes.launcher, data=self._launcher_ended)
            for rank, connection in self._processes.ranks.items():
                listen(connection.channel, data=partial(self._hear, rank))
                if connection.process is not None:
                    listen(connection.process, data=partial(self._rank_ended, rank))
            for machine in self._processes.machines.values():
                listen(machine.channel, data=partial(self._machine_left, machine))
            while self._stop_grace_s is None:
                self._pass_cancellation()
                self._begin_next()
                # What ranks say before that they ended: it tells why.
                events = [key for key, _ in selector.select(self._patience_s())]
                for key in sorted(events, key=lambda key: isinstance(key.fileobj, ProcessHandle)):
                    key.data()
                if self._patience_s() == 0:  # what lay there already has been heard
                    raise WorkerTimeout(
                        f"the ranks did not stop within {CANCEL_TIMEOUT_S:g} s of being told to; "
                        "the group was ended"
                    )

    def _patience_s(self) -> float | None:
        """Seconds left for the ranks to stop; None if nobody told them to."""
        job = self._current
        if job is None or job.cancel_deadline is None:
            return None
        return max(0.0, job.cancel_deadline - time.monotonic())

    def _launcher_ended(self) -> None:
        raise WorkerDied("the worker group's launcher ended unexpectedly")

    def _rank_ended(self, rank: int, cause: ChannelClosed | None = None) -> None:
        while not isinstance(cause, ChannelCut) and self._hear(rank):
            pass
        raise self._last_words.of_rank(rank, cause)

    def _machine_left(self, machine: MachineConnection) -> None:
        raise machine.last_word()

    def _hear(self, rank: int) -> bool:
        """Take one message, if there is a whole one."""
        try:
            received = self._processes.ranks[rank].channel.receive(0)
        except TimeoutError:
            return False
        except ChannelClosed as error:
            raise self._last_words.of_rank(rank, error) from None
        except ProtocolError as error:
            raise WorkerDied(f"{self._last_words.named(rank)} sent nonsense: {error}") from error
        for descriptor in received.fds:
            os.close(descriptor)
        self._take(rank, received.message)
        return True

    def _take(self, rank: int, message: Message) -> None:
        job = self._current
        if isinstance(message, Failed) and message.fatal:
            raise self._last_words.of_failure(rank, message)
        is_expected = job is not None and getattr(message, "id", None) == job.request.id
        if is_expected and job is not None and isinstance(message, Progress):
            job.progress.append(message)
        elif is_expected and job is not None and isinstance(message, Done | Failed):
            job.answers[rank] = message
            if len(job.answers) == self.spec.world_size:
                self._complete(job)
        else:
            raise WorkerDied(
                f"rank {rank} of the worker group sent an unexpected {type(message).__name__}"
            )

    def _complete(self, job: GroupJob) -> None:
        answers = [job.answers[rank] for rank in sorted(job.answers)]
        failures = [answer for answer in answers if isinstance(answer, Failed)]
        with self._lock:
            self._current = None
        if failures:
            job.future.set_exception(shared_error(failures))
        else:
            job.future.set_result(tuple(answer for answer in answers if isinstance(answer, Done)))

    def _pass_cancellation(self) -> None:
        job = self._current
        if job is not None and job.is_cancelled and job.cancel_deadline is None:
            job.cancel_deadline = time.monotonic() + CANCEL_TIMEOUT_S
            self._send_all(Cancel(id=job.request.id), ())

    def _begin_next(self) -> None:
        with self._lock:
            if self._current is not None or not self._pending:
                return
            self._current = job = self._pending.popleft()
        self._send_all(job.request, job.fds)

    def _send_all(self, message: Message, fds: Sequence[int]) -> None:
        for rank, connection in sorted(self._processes.ranks.items()):
            # Ranks of other machines get the tensors from rank 0.
            seen = fds if connection.process is not None else ()
            try:
                connection.channel.send(message, seen, timeout_s=SEND_TIMEOUT_S)
            except ChannelClosed as error:
                self._rank_ended(rank, error)
            except TimeoutError as error:
                name = self._last_words.named(rank)
                raise WorkerDied(f"{name} does not read: {error}") from error


def shared_error(failures: Sequence[Failed]) -> WanDistError:
    """The error that the ranks share: a known class goes before a cancellation, then the rest."""
    for failure in failures:
        if failure.error in CONFIG_ERRORS:
            return CONFIG_ERRORS[failure.error](failure.message)
    for failure in failures:
        if failure.error == JobCancelled.__name__:
            return JobCancelled(failure.message)
    first = failures[0]
    return RemoteError(
        f"rank {first.rank} failed: {first.error}: {first.message}",
        rank=first.rank,
        traceback=first.traceback,
    )
