"""Waiting as a ComfyUI node must: the caller is heard all the while, and may end the wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..ipc.messages import Progress

POLL_S = 0.05

ProgressCallback = Callable[[Progress], None]

T = TypeVar("T")


async def attended(future: Future[T], attend: Callable[[], object] = lambda: None) -> T:
    """The result of `future`, leaving the event loop free.

    attend: called at least every 50 ms, and once more when `future` is done; what it raises is raised here, and
    `future` goes on.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def wake(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(done.set_result, None)

    if not future.done():
        future.add_done_callback(wake)
    while not future.done():
        # Not wait_for: before Python 3.12 it forgets a cancellation that comes together with the result.
        await asyncio.wait([done], timeout=POLL_S)
        attend()
    attend()
    return future.result()


async def outlast(is_over: Callable[[], Any]) -> None:
    """Wait until `is_over`, however often this is cancelled: what it waits for still uses the caller's memory."""
    while not is_over():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(POLL_S)
