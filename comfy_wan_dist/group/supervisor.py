"""The thread of a worker group: it alone touches the sockets, so that every rank gets all messages in the same order.

Requests are done one at a time, in the order in which they were submitted. Callers wait on a job's future, and get its
progress there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from .waiting import POLL_S, ProgressCallback

SEND_TIMEOUT_S = 30.0
CANCEL_TIMEOUT_S = 60.0
SHUTDOWN_GRACE_S = 5.0
DEATH_SETTLE_S = 3.0

logger = logging.getLogger(__name__)


class GroupJob:
    """A request on its way. The supervisor fills it, its caller waits on `future`."""

    def __init__(self, request: Request, fds: Sequence[int]) -> None:
        self.request = request
        self.fds = tuple(fds)
        self.future: Future[tuple[Done, ...]] = Future()
        self.progress: deque[Progress] = deque()
        self.answers: dict[int, Done | Failed] = {}
        self.is_cancelled = False
        self.cancel_deadline: float | None = None

    def deliver(self, on_progress: ProgressCallback | None) -> None:
        while self.progress:
            progress = self.progress.popleft()
            if on_progress is not None:
                on_progress(progress)


class Supervisor:
    """Runs from its making until nothing of the group is left. Safe from several threads."""

    def __init__(self, processes: RunningProcesses, *, on_end: Callable[[], None]) -> None:
        """on_end: called once the processes are gone, before their jobs hear of it."""
        self.ended = threading.Event()
        self._processes = processes
        self._on_end = on_end
        self._last_words = LastWords(processes)
        self._lock = threading.Lock()
        self._pending: deque[GroupJob] = deque()
        self._current: GroupJob | None = None
        self._stop_grace_s: float | None = None
        self._is_called_off = False
        self._last_used = time.monotonic()
        self._holds = 0
        self._wake_lock = threading.Lock()  # a closed descriptor's number may soon be another file
        self._wake_receiver, self._wake_sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        threading.Thread(target=self._run, name="worker-group", daemon=True).start()

    # ---- callers' side ----------------------------------------------------------------------------

    @property
    def takes_jobs(self) -> bool:
        with self._lock:
            return self._takes_jobs()

    def hold(self) -> bool:
        """Keep the idle time-out away until `release`; False if the group ends."""
        with self._lock:
            alive = self._takes_jobs()
            self._holds += alive
            return alive

    def release(self) -> None:
        with self._lock:
            self._holds -= 1
            self._last_used = time.monotonic()

    def submit(self, request: Request, fds: Sequence[int]) -> GroupJob:
        """Queue a request. Raises ConfigError for one that cannot travel, WorkerDied or WorkerStopped."""
        encode(request)  # here, where a number that cannot travel harms nobody but its job
        job = GroupJob(request, fds)
        with self._lock:
            if not self._takes_jobs():
                kind = WorkerStopped if self._is_called_off else WorkerDied
                raise kind("the worker group has ended; run the job again to start a fresh one")
            self._pending.append(job)
        self._wake()
        return job

    def cancel(self, job: GroupJob) -> None:
        with self._lock:
            job.is_cancelled = True
            waiting = job in self._pending
            if waiting:
                self._pending.remove(job)
        if waiting:
            job.future.set_exception(JobCancelled("the job was cancelled before it began"))
        self._wake()

    def begin_stop(self, grace_s: float) -> None:
        with self._lock:
            if self._stop_grace_s is None:
                self._stop_grace_s = grace_s
                self._is_called_off = True
        self._wake()

    def _takes_jobs(self) -> bool:
        return self._stop_grace_s is None and not self.ended.is_set()

    def _wake(self) -> None:
        # A full pipe has woken it already; a closed one has no use for it.
        with self._wake_lock, contextlib.suppress(OSError):
            os.write(self._wake_sender, b"x")

    # ---- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        reason: WanDistError
        grace_s = 0.0
        is_death = True
        try:
            self._serve()
        except _Stopped as stopped:
            grace_s = stopped.grace_s
            is_death = False
            reason = WorkerStopped("the worker group was stopped before the job was done")
        except WanDistError as error:
            reason = self._last_words.added_to(error)
        except Exception as error:
            logger.exception("the worker group's supervisor failed; ending the group")
            reason = WorkerDied(f"the worker group's supervisor failed: {error!r}")
        with self._lock:
            self._stop_grace_s = self._stop_grace_s or 0.0
        try:
            self._processes.end(grace_s=grace_s, settle_s=DEATH_SETTLE_S if is_death else 0.0)
            if is_death:
                reason = self._with_log(reason)
                logger.error("worker group %s: %s", self._processes.spec.degrees, reason)
        finally:
            self._on_end()
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
            with self._wake_lock:
                os.close(self._wake_sender)
                self._wake_sender = -1
        os.close(self._wake_receiver)
        self.ended.set()
        for job in jobs:
            job.future.set_exception(reason)

    def _serve(self) -> None:
        """Pass messages until the group must end; says why by what it raises."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ, self._drain_wakes)
            selector.register(self._processes.launcher, selectors.EVENT_READ, self._launcher_ended)
            for rank, connection in self._processes.ranks.items():
                hear = partial(self._hear, rank)
                selector.register(connection.channel, selectors.EVENT_READ, hear)
                if connection.process is not None:
                    ended = partial(self._rank_ended, rank)
                    selector.register(connection.process, selectors.EVENT_READ, ended)
            for machine in self._processes.machines.values():
                left = partial(self._machine_left, machine)
                selector.register(machine.channel, selectors.EVENT_READ, left)
            while True:
                # What ranks say before that they ended: it tells why.
                events = [key for key, _ in selector.select(self._patience_s())]
                for key in sorted(events, key=lambda key: isinstance(key.fileobj, ProcessHandle)):
                    key.data()
                self._check_deadlines()
                self._pass_cancellation()
                self._begin_next()

    def _patience_s(self) -> float | None:
        job, idle_s = self._current, self._processes.spec.idle_timeout_s
        deadlines = [] if job is None or job.cancel_deadline is None else [job.cancel_deadline]
        if idle_s is not None:
            deadlines.append(max(self._last_used + idle_s, time.monotonic() + POLL_S))
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _drain_wakes(self) -> None:
        os.read(self._wake_receiver, 4096)

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
        channel = self._processes.channel(rank)
        try:
            received = channel.receive(0)
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
            if len(job.answers) == self._processes.spec.world_size:
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
            self._last_used = time.monotonic()
        if failures:
            job.future.set_exception(shared_error(failures))
        else:
            job.future.set_result(tuple(answer for answer in answers if isinstance(answer, Done)))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._stop_grace_s is not None:
                raise _Stopped(self._stop_grace_s)
            job = self._current
            if job is not None and job.cancel_deadline is not None and now > job.cancel_deadline:
                raise WorkerTimeout(
                    f"the ranks did not stop within {CANCEL_TIMEOUT_S:g} s of being told to; "
                    "the group was ended"
                )
            spec = self._processes.spec
            if spec.idle_timeout_s is None or job is not None or self._pending or self._holds:
                return
            if now >= self._last_used + spec.idle_timeout_s:
                logger.info(
                    "worker group %s was idle for %g s; ending it",
                    spec.degrees,
                    spec.idle_timeout_s,
                )
                self._stop_grace_s = SHUTDOWN_GRACE_S
                raise _Stopped(SHUTDOWN_GRACE_S)

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


class _Stopped(Exception):
    """The group is to end on request."""

    def __init__(self, grace_s: float) -> None:
        super().__init__()
        self.grace_s = grace_s


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
