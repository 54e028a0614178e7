"""A rank's life after start-up: take a request, run it, answer it, until told to stop.

The main thread runs one job at a time; inbox.py holds the other thread, which reads the socket
meanwhile.

What becomes of an error: one that all ranks share (voted on by `Job.agree`, or raised by the same
check everywhere and confirmed by the vote at the job's end) is answered and the loop lives. Any
other leaves the ranks in unknown
places of the job: it is answered with `fatal`, and the process exits non-zero so that torchrun ends
the peers.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from comfy_wan_dist.ipc.channel import Channel
from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.ipc.messages import (
    Done,
    Failed,
    JobRequest,
    LedgerLine,
    Progress,
    Request,
    Shutdown,
    TensorRef,
    Unload,
)
from comfy_wan_dist.ipc.shared import SharedBuffer, view_of
from workers.buffers import JobBuffers
from workers.inbox import Inbox
from workers.parallel.agreement import Agreement, error_name

END_VOTE_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStats:
    """What a job cost this rank: bytes asked of model files, the lines of its ledger; the rest as in `Done`."""

    bytes_read: int = 0
    ledger: tuple[LedgerLine, ...] = ()
    peak_bytes: int = 0
    note: str = ""


class Runner(Protocol):
    """What a rank can do. The loop calls it from the main thread only."""

    def run(self, request: JobRequest, job: Job) -> JobStats:
        """Carry out `request`; ranks of ComfyUI's machine write the result into the tensor that the request names."""
        ...

    def unload(self) -> None:
        """Drop all models and give their memory back."""
        ...


class Job:
    """A running job as its runner sees it."""

    def __init__(
        self,
        *,
        id: str,
        buffers: Sequence[SharedBuffer],
        agreement: Agreement,
        is_cancelled: Callable[[], bool],
        send_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._id = id
        self._buffers = buffers
        self._agreement = agreement
        self._is_cancelled = is_cancelled
        self._send_progress = send_progress

    def tensor(self, ref: TensorRef) -> Tensor:
        """The CPU tensor that `ref` names: on ComfyUI's machine a view on memory shared with it.

        Only the request's result may be written to. Raises ProtocolError if the ref does not fit
        its buffer.
        """
        return view_of(self._buffers, ref)

    def report(self, phase: str, done: int, total: int) -> None:
        """Tell the client how far the job is: one message per call, from rank 0 only."""
        if self._send_progress is not None:
            self._send_progress(Progress(id=self._id, phase=phase, done=done, total=total))

    def cancel_requested(self) -> bool:
        """Whether this rank has been told to stop. The others may not know: use `agree_stop`."""
        return self._is_cancelled()

    def agree(self, error: Exception | None) -> None:
        """Vote after a local phase: see `Agreement.agree`. Every rank must call it."""
        self._agreement.agree(error)

    def agree_stop(self) -> bool:
        """Whether any rank has been told to stop; all get one answer. Every rank must call it.

        Once it is True, raise JobCancelled on every rank.
        """
        return self._agreement.agree_stop(self._is_cancelled())

    def agree_least(self, number: int) -> int:
        """The least of the ranks' numbers, the same on every rank. Every rank must call it."""
        return self._agreement.agree_least(number)


class Loop:
    """Serves one client until it says Shutdown."""

    def __init__(
        self,
        *,
        channel: Channel,
        inbox: Inbox,
        runner: Runner,
        agreement: Agreement,
        buffers: JobBuffers,
        rank: int,
    ) -> None:
        self._channel = channel
        self._inbox = inbox
        self._runner = runner
        self._agreement = agreement
        self._buffers = buffers
        self._rank = rank

    def serve(self) -> int:
        """Answer requests until Shutdown (0) or an error that the loop must not outlive (1)."""
        while True:
            received = self._inbox.take()
            message = received.message
            if isinstance(message, Shutdown):
                return 0
            if not isinstance(message, Request):
                logger.error("received %s, which is no request", type(message).__name__)
                return 1
            answer = self._answer(message, received.fds)
            self._inbox.finish(message.id)
            self._channel.send(answer, timeout_s=SEND_TIMEOUT_S)
            if isinstance(answer, Failed) and answer.fatal:
                return 1

    def _answer(self, request: Request, fds: tuple[int, ...]) -> Done | Failed:
        started = time.monotonic()
        stats = JobStats()
        failure: Exception | None = None
        try:
            stats = self._run(request, fds)
        except Exception as error:
            failure = error
        try:
            return self._report(request.id, failure, stats, time.monotonic() - started)
        finally:
            if failure is not None:
                release_frames(failure)

    def _report(
        self, id: str, failure: Exception | None, stats: JobStats, seconds: float
    ) -> Done | Failed:
        """Agree with the other ranks on how the job ended."""
        shared = self._agreement.take_failure()
        if shared is None or shared.error is not failure:
            try:
                if failure is not None and not isinstance(failure, WanDistError):
                    return self._fatal(id, failure)
                limit = None if failure is None else END_VOTE_TIMEOUT_S
                self._agreement.agree_end(failure, timeout_s=limit)
            except Exception as error:
                shared = self._agreement.take_failure()
                if shared is None or shared.error is not error:
                    return self._fatal(id, failure or error)
        if shared is not None:
            logger.info("job %s ended on all ranks: %s: %s", id, shared.name, shared.message)
            return Failed(
                id=id,
                rank=shared.rank,
                error=shared.name,
                message=shared.message,
                traceback=shared.traceback,
                fatal=False,
            )
        return Done(
            id=id,
            rank=self._rank,
            seconds=seconds,
            bytes_read=stats.bytes_read,
            ledger=stats.ledger,
            peak_bytes=stats.peak_bytes,
            note=stats.note,
        )

    def _run(self, request: Request, fds: tuple[int, ...]) -> JobStats:
        buffers = self._buffers.adopt(request, fds)
        if isinstance(request, Unload):
            self._buffers.clear()
            self._runner.unload()
            return JobStats()
        job = Job(
            id=request.id,
            buffers=buffers,
            agreement=self._agreement,
            is_cancelled=lambda: self._inbox.is_cancelled(request.id),
            send_progress=self._send_progress if self._rank == 0 else None,
        )
        return self._runner.run(request, job)

    def _send_progress(self, progress: Progress) -> None:
        self._channel.send(progress, timeout_s=SEND_TIMEOUT_S)

    def _fatal(self, id: str, error: Exception) -> Failed:
        logger.error("job %s failed on this rank alone; ending", id, exc_info=error)
        return Failed(
            id=id,
            rank=self._rank,
            error=error_name(error),
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            fatal=True,
        )


def release_frames(error: BaseException) -> None:
    """Let go of the tensors in the frames that `error` and its causes came through.

    An exception and the frame that holds it keep each other alive until the garbage collector runs, and with them
    whatever a failed job had allocated.
    """
    chain: BaseException | None = error
    while chain is not None:
        if chain.__traceback__ is not None:
            traceback.clear_frames(chain.__traceback__)
            chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
