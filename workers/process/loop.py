"""What a rank does with messages: one thread hears them, the main thread answers one request at a time.

The end of the socket means that ComfyUI is gone. The hearing thread then ends the process at once, even
when the main thread sits in a collective that will never complete, because nobody is left to work
for.

What becomes of an error: one that all ranks share (voted on by `Job.agree`, or raised by the same
check everywhere and confirmed by the vote at the job's end) is answered and the loop lives. Any
other leaves the ranks in unknown places of the job: it is answered with `fatal`, and the process
exits non-zero so that torchrun ends the peers.

Imports no torch: the thread runs from the rank's first moments on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from comfy_wan_dist.ipc.channel import ChannelClosed, Received, SocketChannel
from comfy_wan_dist.ipc.errors import WanDistError, error_name
from comfy_wan_dist.ipc.messages import Cancel, Done, Failed, Progress, Request, Shutdown

if TYPE_CHECKING:
    from workers.job import JobStats, Runner
    from workers.parallel.agreement import Agreement

    from .buffers import AdoptBuffers

END_VOTE_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


def end_process(reason: str, status: int) -> None:
    """End without cleaning up. No logging: its lock may belong to a thread that is stuck."""
    with contextlib.suppress(OSError):  # a full disk, say
        os.write(2, f"ending: {reason}\n".encode(errors="replace"))
    os._exit(status)


class Inbox:
    """Requests in the order in which they came, and which of them are to stop."""

    def __init__(
        self, channel: SocketChannel, *, on_end: Callable[[str, int], None] = end_process
    ) -> None:
        self._channel = channel
        self._on_end = on_end
        self._queue: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._cancelled: set[str] = set()
        self._is_shutting_down = False
        self._thread = threading.Thread(target=self._read, name="inbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Received:
        """Wait for the next request or Shutdown; its descriptors become the caller's."""
        return self._queue.get()

    def is_cancelled(self, id: str) -> bool:
        with self._lock:
            return self._is_shutting_down or id in self._cancelled

    def finish(self, id: str) -> None:
        """Job `id` is over: a Cancel that comes later means nothing."""
        with self._lock:
            self._open.discard(id)
            self._cancelled.discard(id)

    def _read(self) -> None:
        try:
            while True:
                received = self._channel.receive(None)
                message = received.message
                with self._lock:
                    if isinstance(message, Cancel):
                        self._cancelled |= self._open & {message.id}
                        continue
                    if isinstance(message, Shutdown):
                        self._is_shutting_down = True
                    else:
                        self._open.add(getattr(message, "id", ""))
                self._queue.put(received)
        except ChannelClosed as error:
            self._on_end(str(error), 0)
        except Exception as error:  # without this thread the process would outlive ComfyUI
            self._on_end(f"{type(error).__name__}: {error}", 1)


class Loop:
    """Serves one client until it says Shutdown."""

    def __init__(
        self,
        *,
        channel: SocketChannel,
        inbox: Inbox,
        runner: Runner,
        agreement: Agreement,
        adopt: AdoptBuffers,
        rank: int,
    ) -> None:
        self._channel = channel
        self._inbox = inbox
        self._runner = runner
        self._agreement = agreement
        self._adopt = adopt
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
        stats: JobStats | None = None
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
        self, id: str, failure: Exception | None, stats: JobStats | None, seconds: float
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
        assert stats is not None, "the vote raises a failure"
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
        from workers.job import Job

        job = Job(
            id=request.id,
            buffers=self._adopt(request, fds),
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
