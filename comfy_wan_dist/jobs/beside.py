"""An event loop beside a thread whose own may be in the middle of something, and which waits for what the loop does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class LoopBeside:
    """An event loop in a thread of its own, from the first use until it is closed. For one thread at a time."""

    def __init__(self) -> None:
        self._serving: _Serving | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises. What it calls of ComfyUI takes it for this thread's node."""
        if self._serving is None:
            self._serving = _serve()
        done = asyncio.run_coroutine_threadsafe(work, self._serving.loop)
        try:
            return done.result()
        except BaseException:  # of the wait, such as KeyboardInterrupt; else it is over already
            done.cancel()
            raise

    def close(self) -> None:
        """End the thread, once what was broken off has ended. `run` begins another."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.loop.call_soon_threadsafe(serving.closing.set)
            serving.thread.join()


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
