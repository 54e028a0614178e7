"""An event loop beside the thread that a node runs in.

ComfyUI's nodes share one thread and its event loop, and a stock sampler holds both up until it ends. What goes on in
this loop goes on all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from ..group.waiting import POLL_S, attended, outlast
from ..ipc.errors import JobCancelled

T = TypeVar("T")


class LoopBeside:
    """An event loop in a thread of its own, from the first use until it is closed. Any thread may use it.

    What is under way then, or begun later, raises JobCancelled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serving: _Serving | None = None
        self._is_closed = False

    async def attended(self, work: Coroutine[Any, Any, T], attend: Callable[[], None]) -> T:
        """What `work`, done in the loop, returns or raises; this thread's own loop is free meanwhile.

        attend: called in this thread at least every 50 ms if its loop is not held up, and once more when `work` is
        done. What it raises, and a cancellation, cancel `work`, and are raised once that has ended.
        """
        loop, task, done = self._begin(work)
        try:
            return await attended(done, attend)
        except BaseException:
            _cancel(task, loop)
            await outlast(done.done)
            raise

    def blocking(self, work: Coroutine[Any, Any, T], attend: Callable[[], None]) -> T:
        """`attended` for a thread that has nothing else to do, or whose loop is held up anyway."""
        loop, task, done = self._begin(work)
        try:
            while not wait([done], timeout=POLL_S).done:
                attend()
            attend()
            return done.result()
        except BaseException:
            _cancel(task, loop)
            wait([done])
            raise

    def close(self) -> None:
        """End the thread, and what is still under way in it."""
        with self._lock:
            serving, self._serving, self._is_closed = self._serving, None, True
        if serving is not None:
            serving.loop.call_soon_threadsafe(serving.closing.set)  # behind what was begun before
            serving.thread.join()

    def _begin(
        self, work: Coroutine[Any, Any, T]
    ) -> tuple[asyncio.AbstractEventLoop, asyncio.Task[T], Future[T]]:
        """The loop, the task, and a future that is done when the task has ended, whichever way."""
        begun: Future[asyncio.Task[T]] = Future()
        done: Future[T] = Future()

        def begin(loop: asyncio.AbstractEventLoop) -> None:
            task = loop.create_task(work)
            task.add_done_callback(lambda ended: _hand_over(ended, done))
            begun.set_result(task)

        with self._lock:  # to the end: once it closes, a loop takes nothing more
            if self._is_closed:
                work.close()
                raise _ended()
            if self._serving is None:
                self._serving = _serve()
            loop = self._serving.loop
            # In a copy of this thread's context: what asks ComfyUI asks for this node.
            loop.call_soon_threadsafe(begin, loop)
        return loop, begun.result(), done


@dataclass(frozen=True, kw_only=True, slots=True)
class _Serving:
    loop: asyncio.AbstractEventLoop
    closing: asyncio.Event
    thread: threading.Thread


def _serve() -> _Serving:
    """A loop that serves in a new thread until it is `closing`."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        closing = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), closing))
        await closing.wait()

    thread = threading.Thread(
        target=lambda: asyncio.run(serve()), name="wan-dist-beside", daemon=True
    )
    thread.start()
    loop, closing = started.result()
    return _Serving(loop=loop, closing=closing, thread=thread)


def _ended() -> JobCancelled:
    """Not a CancelledError, which is no Exception: it would end the thread of ComfyUI's prompts."""
    return JobCancelled("the job was stopped, as the sampler or node that asked for it has ended")


def _cancel(task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed, and the task ended with it
        loop.call_soon_threadsafe(task.cancel)


def _hand_over(ended: asyncio.Task[T], done: Future[T]) -> None:
    if ended.cancelled():  # nobody waits any more, or the loop was closed
        done.set_exception(_ended())
    elif (error := ended.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(ended.result())
