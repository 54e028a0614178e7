"""A lease of a worker group, and a job on it, for a thread without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.registry import GroupRegistry
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.group.waiting import InterruptCheck, ignore
from comfy_wan_dist.ipc.messages import Done, Request
from comfy_wan_dist.ipc.shared import BufferPool, Parcel


@contextlib.contextmanager
def leased(
    registry: GroupRegistry, spec: LaunchSpec, *, check_interrupt: InterruptCheck = ignore
) -> Iterator[WorkerGroup]:
    """`registry.lease`, in a loop of its own that runs while the lease begins and ends."""
    loop = asyncio.new_event_loop()
    lease = registry.lease(spec, check_interrupt=check_interrupt)
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


def run_blocking(
    group: WorkerGroup, request: Request, parcel: Parcel, **options: Any
) -> tuple[Done, ...]:
    """`group.run` with the tensors of `parcel`."""
    return asyncio.run(group.run(request, parcel.fds, **options))
