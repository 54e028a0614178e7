"""The event loop beside a node's thread: it goes on when the node's own is held up, and ends what is broken off."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from comfy_wan_dist.ipc.errors import JobCancelled
from comfy_wan_dist.jobs.beside import LoopBeside

NODE = contextvars.ContextVar("NODE", default="none")


class Interrupted(Exception): ...


@pytest.fixture
def beside() -> Iterator[LoopBeside]:
    threads = set(threading.enumerate())
    loop = LoopBeside()
    yield loop
    loop.close()
    loop.close()
    assert set(threading.enumerate()) <= threads


async def work(seconds: float = 0.0, ended: list[str] | None = None) -> str:
    try:
        await asyncio.sleep(seconds)
        return f"{NODE.get()} {threading.current_thread().name}"
    finally:
        if ended is not None:
            await asyncio.sleep(0.1)  # ranks are told, and answer
            ended.append("ended")


def nothing() -> None: ...


def interrupt() -> None:
    raise Interrupted


def test_work_goes_on_while_the_own_loop_is_held_up(beside: LoopBeside) -> None:
    ended: list[str] = []

    async def node() -> str:
        return await beside.attended(work(0.05, ended), nothing)

    async def main() -> None:
        task = asyncio.create_task(node())
        await asyncio.sleep(0.01)
        deadline = time.monotonic() + 5
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)  # a stock sampler
        assert ended
        assert not task.done()
        await task

    asyncio.run(main())


def test_a_thread_may_wait_in_the_middle_of_its_own_loop(beside: LoopBeside) -> None:
    attended: list[str] = []

    async def main() -> None:
        NODE.set("a node")
        assert beside.blocking(
            work(0.2), lambda: attended.append(threading.current_thread().name)
        ).startswith("a node wan-dist")
        assert beside.blocking(work(), nothing).startswith("a node")

    asyncio.run(main())
    assert len(attended) > 2
    assert set(attended) == {threading.current_thread().name}


@pytest.mark.parametrize("is_blocking", [False, True])
def test_an_interrupt_is_raised_once_the_work_has_ended(
    beside: LoopBeside, is_blocking: bool
) -> None:
    ended: list[str] = []

    async def main() -> str:
        if is_blocking:
            return beside.blocking(work(60, ended), interrupt)
        return await beside.attended(work(60, ended), interrupt)

    with pytest.raises(Interrupted):
        asyncio.run(main())
    assert ended


def test_a_cancelled_node_outlasts_its_work(beside: LoopBeside) -> None:
    ended: list[str] = []

    async def main() -> None:
        task = asyncio.create_task(beside.attended(work(60, ended), nothing))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.02)
        task.cancel()  # once more, while the work ends
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(main())


@pytest.mark.parametrize("is_blocking", [False, True])
def test_errors_come_through_and_it_goes_on(beside: LoopBeside, is_blocking: bool) -> None:
    async def fail() -> None:
        raise OSError("broken")

    async def main() -> None:
        if is_blocking:
            beside.blocking(fail(), nothing)
        await beside.attended(fail(), nothing)

    with pytest.raises(OSError, match="broken"):
        asyncio.run(main())
    assert "wan-dist" in beside.blocking(work(), nothing)


def test_several_threads_may_wait_at_once(beside: LoopBeside) -> None:
    """As a sampler of another pack may call a model."""
    with ThreadPoolExecutor(max_workers=8) as threads:
        found = list(threads.map(lambda _: beside.blocking(work(0.05), nothing), range(16)))
    assert len(set(found)) == 1


class ClosedBehind:
    """A lock; when it is let go for the first time, another thread closes the loop before anything else is done."""

    def __init__(self, beside: LoopBeside) -> None:
        self._beside = beside
        self._lock = threading.Lock()
        self._is_first = True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._is_first:
            self._is_first = False
            self._beside.close()


def test_what_is_begun_while_another_thread_closes_it_ends(
    beside: LoopBeside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended with the loop, and is not lost in one that has closed."""
    monkeypatch.setattr(beside, "_lock", ClosedBehind(beside))
    with pytest.raises(JobCancelled, match="has ended"):
        beside.blocking(work(60), nothing)


@pytest.mark.parametrize("is_blocking", [False, True])
def test_whoever_waits_when_it_is_closed_is_told_so_by_an_error_that_comfyui_catches(
    beside: LoopBeside, is_blocking: bool
) -> None:
    """A CancelledError is no Exception, and would end the thread of ComfyUI's prompts."""
    ended: list[str] = []

    def close_once() -> None:
        if not ended:
            beside.close()

    async def main() -> None:
        if is_blocking:
            beside.blocking(work(60, ended), close_once)
        await beside.attended(work(60, ended), close_once)

    with pytest.raises(JobCancelled, match="has ended"):
        asyncio.run(main())
    assert ended


@pytest.mark.parametrize("is_used", [False, True])
def test_nothing_is_begun_in_a_closed_one(beside: LoopBeside, is_used: bool) -> None:
    """As by a thread that outlives its sampler: the loop that it began would never be closed."""
    if is_used:
        beside.blocking(work(), nothing)
    beside.close()
    with pytest.raises(JobCancelled, match="has ended"):
        beside.blocking(work(), nothing)
    assert not [each for each in threading.enumerate() if each.name == "wan-dist-beside"]
