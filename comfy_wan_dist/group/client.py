"""A ready worker group: hands jobs to its ranks, hears them, and ends them.

One thread per group (the supervisor) owns the sockets, so that every rank gets all messages in the
same order and jobs run one at a time in the order of submission. Callers wait on a job's future, in
a thread or in an event loop, and call `on_progress` and `check_interrupt` there: ComfyUI expects
both in the thread that executes the node.

Covered: results, errors by class, cancellation, death of ranks or launcher, the end of the group.
Not covered: starting another one (registry.py).
"""

from __future__ import annotations

import asyncio
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
from ..ipc.shared import BufferPool, Parcel
from .launch import RunningProcesses
from .machines.door import MachineConnection, lost_machine
from .process import ProcessHandle
from .spec import LaunchSpec

POLL_S = 0.05
SEND_TIMEOUT_S = 30.0
CANCEL_TIMEOUT_S = 60.0
SHUTDOWN_GRACE_S = 5.0
DEATH_SETTLE_S = 3.0
PEER_SETTLE_S = 0.2
MACHINE_SETTLE_S = 1.0

ProgressCallback = Callable[[Progress], None]
InterruptCheck = Callable[[], None]

logger = logging.getLogger(__name__)


class _Job:
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


class WorkerGroup:
    """The client of one running plane. Safe from several threads and event loops."""

    def __init__(self, processes: RunningProcesses) -> None:
        self._processes = processes
        self.pool = BufferPool()
        self._lock = threading.Lock()
        self._pending: deque[_Job] = deque()
        self._current: _Job | None = None
        self._stop_grace_s: float | None = None
        self._is_called_off = False
        self._last_used = time.monotonic()
        self._holds = 0
        self._ended = threading.Event()
        self._death_is_explained = False
        self._wake_lock = threading.Lock()  # a closed descriptor's number may soon be another file
        self._wake_receiver, self._wake_sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._supervise, name="worker-group", daemon=True)
        self._thread.start()

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
        with self._lock:
            return self._takes_jobs()

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the group is left."""
        return self._ended.is_set()

    def parcel(self) -> Parcel:
        """Room for one job's tensors, out of buffers that earlier jobs used."""
        return Parcel(self.pool)

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

    async def run(
        self,
        request: Request,
        fds: Sequence[int] = (),
        *,
        on_progress: ProgressCallback | None = None,
        check_interrupt: InterruptCheck | None = None,
    ) -> tuple[Done, ...]:
        """Have `request` done; return the ranks' answers in their order. Leaves the loop free.

        fds: the descriptors that the request's TensorRefs count; they stay the caller's.
        on_progress, check_interrupt: called here, at least every 50 ms while waiting; what they
        raise, and a cancellation of this coroutine, cancels the job on all ranks and is raised once
        all of them have stopped.

        Raises a class of CONFIG_ERRORS, JobCancelled or RemoteError for what the ranks raised,
        after which the group lives on; WorkerDied or WorkerTimeout if the group has ended.
        """
        job = self._submit(request, fds)
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake(_: Future[tuple[Done, ...]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(changed.set)

        job.future.add_done_callback(wake)
        try:
            while not job.future.done():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), POLL_S)
                _attend(job, on_progress, check_interrupt)
            job.deliver(on_progress)
        except BaseException:
            self._cancel(job)
            while not job.future.done():
                # A second cancellation changes nothing: the ranks still use the job's tensors.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(POLL_S)
            raise
        return job.future.result()

    def run_blocking(
        self,
        request: Request,
        fds: Sequence[int] = (),
        *,
        on_progress: ProgressCallback | None = None,
        check_interrupt: InterruptCheck | None = None,
    ) -> tuple[Done, ...]:
        """`run` for a thread without an event loop."""
        job = self._submit(request, fds)
        done = threading.Event()
        job.future.add_done_callback(lambda _: done.set())
        try:
            while not done.wait(POLL_S):
                _attend(job, on_progress, check_interrupt)
            job.deliver(on_progress)
        except BaseException:
            self._cancel(job)
            done.wait()
            raise
        return job.future.result()

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
            if self._stop_grace_s is None:
                self._stop_grace_s = grace_s
                self._is_called_off = True
        self._wake()

    # ---- callers' side ----------------------------------------------------------------------------

    def _takes_jobs(self) -> bool:
        return self._stop_grace_s is None and not self._ended.is_set()

    def _submit(self, request: Request, fds: Sequence[int]) -> _Job:
        encode(request)  # here, where a number that cannot travel harms nobody but its job
        job = _Job(request, fds)
        with self._lock:
            if not self._takes_jobs():
                kind = WorkerStopped if self._is_called_off else WorkerDied
                raise kind("the worker group has ended; run the job again to start a fresh one")
            self._pending.append(job)
        self._wake()
        return job

    def _cancel(self, job: _Job) -> None:
        with self._lock:
            job.is_cancelled = True
            waiting = job in self._pending
            if waiting:
                self._pending.remove(job)
        if waiting:
            job.future.set_exception(JobCancelled("the job was cancelled before it began"))
        self._wake()

    def _wake(self) -> None:
        # A full pipe has woken it already; a closed one has no use for it.
        with self._wake_lock, contextlib.suppress(OSError):
            os.write(self._wake_sender, b"x")

    # ---- supervisor's side ------------------------------------------------------------------------

    def _supervise(self) -> None:
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
            reason = self._with_last_words(error)
        except Exception as error:
            logger.exception("the worker group's supervisor failed; ending the group")
            reason = WorkerDied(f"the worker group's supervisor failed: {error!r}")
        with self._lock:
            self._stop_grace_s = self._stop_grace_s or 0.0
        try:
            self._processes.end(grace_s=grace_s, settle_s=DEATH_SETTLE_S if is_death else 0.0)
            if is_death:
                log = self._processes.log
                if self._death_is_explained:
                    reason = type(reason)(f"{reason}\nMore may be in {log.path}.")
                else:
                    reason = type(reason)(f"{reason}{log.quoted()}")
                logger.error("worker group %s: %s", self.spec.degrees, reason)
        finally:
            self.pool.close()
            with self._lock:
                jobs = [*([self._current] if self._current else []), *self._pending]
                self._current = None
                self._pending.clear()
                with self._wake_lock:
                    os.close(self._wake_sender)
                    self._wake_sender = -1
            os.close(self._wake_receiver)
            self._ended.set()
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
        job = self._current
        deadlines = [] if job is None or job.cancel_deadline is None else [job.cancel_deadline]
        if self.spec.idle_timeout_s is not None:
            deadlines.append(
                max(self._last_used + self.spec.idle_timeout_s, time.monotonic() + POLL_S)
            )
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _drain_wakes(self) -> None:
        os.read(self._wake_receiver, 4096)

    def _launcher_ended(self) -> None:
        raise WorkerDied("the worker group's launcher ended unexpectedly")

    def _rank_ended(self, rank: int, cause: ChannelClosed | None = None) -> None:
        while not isinstance(cause, ChannelCut) and self._hear(rank):
            pass
        raise self._death_of(rank, cause)

    def _machine_left(self, machine: MachineConnection) -> None:
        raise machine.last_word()

    def _death_of(self, rank: int, cause: ChannelClosed | None = None) -> WorkerDied:
        """What to raise for a rank that is gone: with its machine, if that is gone too."""
        connection = self._processes.ranks[rank]
        machine = self._processes.machines.get(connection.machine)
        if machine is not None and isinstance(cause, ChannelCut):
            return lost_machine(connection.host, cause)
        death = f"{self._named(rank)} ended unexpectedly"
        if machine is not None and machine.channel.has_word_within(MACHINE_SETTLE_S):
            reason = machine.last_word()
            self._death_is_explained = True
            return type(reason)(f"{death}; {reason}")
        return WorkerDied(death)

    def _named(self, rank: int) -> str:
        return f"rank {rank} of the worker group{self._processes.ranks[rank].place}"

    def _hear(self, rank: int) -> bool:
        """Take one message, if there is a whole one."""
        channel = self._processes.channel(rank)
        try:
            received = channel.receive(0)
        except TimeoutError:
            return False
        except ChannelClosed as error:
            raise self._death_of(rank, error) from None
        except ProtocolError as error:
            raise WorkerDied(f"{self._named(rank)} sent nonsense: {error}") from error
        for descriptor in received.fds:
            os.close(descriptor)
        self._take(rank, received.message)
        return True

    def _take(self, rank: int, message: Message) -> None:
        job = self._current
        if isinstance(message, Failed) and message.fatal:
            silent = self._silent_rank(besides=rank)
            if silent is not None:
                raise self._death_of(silent)
            self._death_is_explained = True
            raise WorkerDied(self._last_words(rank, message))
        if job is None or getattr(message, "id", None) != job.request.id:
            raise WorkerDied(
                f"rank {rank} of the worker group sent an unexpected {type(message).__name__}"
            )
        if isinstance(message, Progress):
            job.progress.append(message)
        elif isinstance(message, Done | Failed):
            job.answers[rank] = message
            if len(job.answers) == self.spec.world_size:
                self._complete(job)
        else:
            raise WorkerDied(
                f"rank {rank} of the worker group sent an unexpected {type(message).__name__}"
            )

    def _silent_rank(self, *, besides: int) -> int | None:
        """A rank that is gone without a word, if there is one: the others only report that they lost it."""
        deadline = time.monotonic() + PEER_SETTLE_S
        for rank, connection in sorted(self._processes.ranks.items()):
            if rank == besides or not connection.ends_within(deadline - time.monotonic()):
                continue
            is_silent = True
            with contextlib.suppress(TimeoutError, ChannelClosed, ProtocolError):
                while is_silent:
                    received = connection.channel.receive(0)
                    for descriptor in received.fds:
                        os.close(descriptor)
                    is_silent = not isinstance(received.message, Failed)
            if is_silent:
                return rank
        return None

    def _with_last_words(self, error: WanDistError) -> WanDistError:
        """`error` with what ranks say in messages that nobody has read yet: often the reason."""
        if type(error) is not WorkerDied or self._death_is_explained:
            return error
        for rank, connection in sorted(self._processes.ranks.items()):
            with contextlib.suppress(TimeoutError, ChannelClosed, ProtocolError):
                while True:
                    received = connection.channel.receive(0)
                    for descriptor in received.fds:
                        os.close(descriptor)
                    message = received.message
                    if isinstance(message, Failed) and message.fatal:
                        return WorkerDied(f"{error}; {self._last_words(rank, message)}")
        return error

    def _last_words(self, rank: int, failed: Failed) -> str:
        return f"{self._named(rank)} failed: {failed.error}: {failed.message}\n{failed.traceback}"

    def _complete(self, job: _Job) -> None:
        answers = [job.answers[rank] for rank in sorted(job.answers)]
        failures = [answer for answer in answers if isinstance(answer, Failed)]
        with self._lock:
            self._current = None
            self._last_used = time.monotonic()
        if failures:
            job.future.set_exception(_as_error(failures))
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
            idle_s = self.spec.idle_timeout_s
            if idle_s is None or job is not None or self._pending or self._holds:
                return
            if now >= self._last_used + idle_s:
                logger.info(
                    "worker group %s was idle for %g s; ending it", self.spec.degrees, idle_s
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
                raise WorkerDied(f"{self._named(rank)} does not read: {error}") from error


class _Stopped(Exception):
    """The group is to end on request."""

    def __init__(self, grace_s: float) -> None:
        super().__init__()
        self.grace_s = grace_s


def _attend(
    job: _Job, on_progress: ProgressCallback | None, check_interrupt: InterruptCheck | None
) -> None:
    job.deliver(on_progress)
    if check_interrupt is not None:
        check_interrupt()


def _as_error(failures: Sequence[Failed]) -> WanDistError:
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
