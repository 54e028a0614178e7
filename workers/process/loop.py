"""A rank's life after start-up: take a request, run it, answer it, until told to stop.

The main thread runs one job at a time; inbox.py holds the other thread, which reads the socket
meanwhile.

What becomes of an error: one that all ranks share (voted on by `Job.agree`, or raised by the same
check everywhere and confirmed by the vote at the job's end) is answered and the loop lives. Any
other leaves the ranks in unknown places of the job: it is answered with `fatal`, and the process
exits non-zero so that torchrun ends the peers.
"""

from __future__ import annotations

import logging
import time
import traceback

from comfy_wan_dist.ipc.channel import Channel
from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.ipc.messages import (
    Done,
    Failed,
    Progress,
    Request,
    Shutdown,
    Unload,
)
from workers.job import Job, JobStats, Runner
from workers.parallel.agreement import Agreement, error_name

from .buffers import JobBuffers
from .inbox import Inbox

END_VOTE_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


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
            cancel_requested=lambda: self._inbox.is_cancelled(request.id),
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
