"""A ready worker group: hands jobs to its ranks, and ends them.

Callers wait in a thread or in an event loop, and `on_progress` and `check_interrupt` are called there: ComfyUI expects
both in the thread that executes the node.

Covered: results, errors by class, cancellation, death of ranks or launcher, the end of the group (supervisor.py).
Not covered: starting another one (registry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ipc.messages import Done, Request
from ..ipc.shared import BufferPool, Parcel
from .launch import RunningProcesses
from .spec import LaunchSpec
from .supervisor import SHUTDOWN_GRACE_S, GroupJob, Supervisor
from .waiting import (
    InterruptCheck,
    ProgressCallback,
    attended,
    attended_blocking,
    ignore,
    outlast,
)


class WorkerGroup:
    """The client of one running plane. Safe from several threads and event loops."""

    def __init__(self, processes: RunningProcesses) -> None:
        self._processes = processes
        self._pool = BufferPool()
        self._supervisor = Supervisor(processes, on_end=self._pool.close)
        self.hold, self.release = self._supervisor.hold, self._supervisor.release

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
        return self._supervisor.takes_jobs

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the group is left."""
        return self._supervisor.ended.is_set()

    def parcel(self) -> Parcel:
        """Room for one job's tensors, out of buffers that earlier jobs used."""
        return Parcel(self._pool)

    async def run(
        self,
        request: Request,
        fds: Sequence[int] = (),
        *,
        on_progress: ProgressCallback | None = None,
        check_interrupt: InterruptCheck = ignore,
    ) -> tuple[Done, ...]:
        """Have `request` done; return the ranks' answers in their order. Leaves the loop free.

        fds: the descriptors that the request's TensorRefs count; they stay the caller's.
        on_progress, check_interrupt: called here, at least every 50 ms while waiting; what they
        raise, and a cancellation of this coroutine, cancels the job on all ranks and is raised once
        all of them have stopped.

        Raises a class of CONFIG_ERRORS, JobCancelled or RemoteError for what the ranks raised,
        after which the group lives on; WorkerDied or WorkerTimeout if the group has ended.
        """
        job = self._supervisor.submit(request, fds)
        try:
            return await attended(job.future, _attention(job, on_progress, check_interrupt))
        except BaseException:
            self._supervisor.cancel(job)
            await outlast(job.future.done)
            raise

    def run_blocking(
        self,
        request: Request,
        fds: Sequence[int] = (),
        *,
        on_progress: ProgressCallback | None = None,
        check_interrupt: InterruptCheck = ignore,
    ) -> tuple[Done, ...]:
        """`run` for a thread without an event loop."""
        job = self._supervisor.submit(request, fds)
        attend = _attention(job, on_progress, check_interrupt)
        try:
            return attended_blocking(job.future, attend)
        except BaseException:
            self._supervisor.cancel(job)
            job.future.exception()  # waits
            raise

    def stop(self, *, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """End the group and wait until nothing of it is left. Its jobs raise WorkerStopped.

        grace_s: how long the ranks may take to end by themselves. May be called twice, and after a
        death.
        """
        self.begin_stop(grace_s=grace_s)
        self._supervisor.ended.wait()

    def begin_stop(self, *, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        """`stop` without the wait."""
        self._supervisor.begin_stop(grace_s)


def _attention(
    job: GroupJob, on_progress: ProgressCallback | None, check_interrupt: InterruptCheck
) -> Callable[[], None]:
    def attend() -> None:
        job.deliver(on_progress)
        check_interrupt()

    return attend
