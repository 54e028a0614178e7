"""A lease of a worker group, and a job on it, for a thread without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.registry import GroupRegistry
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.group.waiting import POLL_S
from comfy_wan_dist.ipc.messages import Done, Request
from comfy_wan_dist.ipc.shared import BufferPool, Parcel

T = TypeVar("T")


@contextlib.contextmanager
def leased(registry: GroupRegistry, spec: LaunchSpec) -> Iterator[WorkerGroup]:
    """`registry.lease`, in a loop of its own that runs while the lease begins and ends."""
    loop = asyncio.new_event_loop()
    lease = registry.lease(spec)
    try:
        group = loop.run_until_complete(lease.__aenter__())
        try:
            yield group
        except BaseException:
            loop.run_until_complete(lease.__aexit__(*sys.exc_info()))
            raise
        loop.run_until_complete(lease.__aexit__(None, None, None))
    finally:
        loop.close()


@contextlib.contextmanager
def lone_parcel() -> Iterator[Parcel]:
    """A parcel whose buffers serve no other."""
    with contextlib.closing(BufferPool()) as pool, Parcel(pool) as parcel:
        yield parcel


async def interrupted_by(check: Callable[[], None], work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, in this loop. What `check` raises, asked as often as a node asks, cancels it."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=POLL_S)
            check()
        return task.result()
    except BaseException:
        task.cancel()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


def run_blocking(
    group: WorkerGroup, request: Request, parcel: Parcel, **options: Any
) -> tuple[Done, ...]:
    """`group.run` with the tensors of `parcel`."""
    return asyncio.run(group.run(request, parcel.fds, **options))
