"""Groups that die, do not start, or give way: what is raised, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from group_kit import (
    Interrupted,
    ask,
    assert_nothing_left,
    is_running,
    processes_naming,
    search_path,
    stub_request,
    stub_spec,
    wait_until,
)

from comfy_wan_dist.group import client as client_module
from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.registry import GroupRegistry
from comfy_wan_dist.ipc.errors import (
    JobCancelled,
    WorkerDied,
    WorkerError,
    WorkerStartError,
    WorkerTimeout,
)
from devtools.leasing import interrupted_by, leased, lone_parcel


@pytest.fixture(autouse=True)
def runner_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path())


def kill_later(pid: int, after_s: float) -> threading.Timer:
    timer = threading.Timer(after_s, os.kill, (pid, signal.SIGKILL))
    timer.start()
    return timer


def test_death_of_rank_launcher_and_overload_end_one_group_each(
    registry: GroupRegistry, private: Path, tmp_path: Path
) -> None:
    """One test, because each group takes seconds to start."""
    log = tmp_path / "group.log"
    spec = stub_spec(log)

    # A rank is killed in a job that the others wait in.
    with leased(registry, spec) as group:
        first_pids = group.pids
        timer = kill_later(first_pids[2], 0.3)
        started = time.monotonic()
        with pytest.raises(WorkerDied, match=r"(?s)rank \d.*The end of"):
            ask(group, "hang")
        assert time.monotonic() - started < 8
        timer.join()
        assert not group.is_alive
        with pytest.raises(WorkerDied, match="has ended"):
            ask(group, "echo")
    assert_nothing_left(private, first_pids)

    # The next lease starts a fresh group. A rank raises what nobody else sees.
    with leased(registry, spec) as group:
        assert group.pids != first_pids
        assert torch.equal(ask(group, "echo"), torch.arange(4.0) + 1)
        with pytest.raises(WorkerDied, match=r"(?s)rank 1.*RuntimeError: out of luck.*Traceback"):
            ask(group, "crash:1")
    assert_nothing_left(private, group.pids)

    # The launcher is killed while the group is idle.
    with leased(registry, spec) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        assert wait_until(lambda: group.has_ended, 8)
    assert_nothing_left(private, group.pids)
    assert "out of luck" in log.read_text()  # of the group before


def test_ranks_that_do_not_stop_when_told_are_ended(
    registry: GroupRegistry, private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CANCEL_TIMEOUT_S", 0.5)

    def interrupt() -> None:
        raise Interrupted

    with leased(registry, stub_spec(tmp_path / "log")) as group:
        waiting: list[BaseException] = []

        def ask_second() -> None:
            try:
                ask(group, "echo")
            except WorkerError as error:
                waiting.append(error)

        with lone_parcel() as parcel:
            second = threading.Timer(0.01, ask_second)
            second.start()
            started = time.monotonic()
            run = group.run(stub_request(parcel, "busy"), parcel.fds)
            with pytest.raises(Interrupted):
                asyncio.run(interrupted_by(interrupt, run))
            assert time.monotonic() - started < 8
        second.join()
        assert not group.is_alive
        assert [type(error) for error in waiting] in ([WorkerTimeout], [WorkerDied])
    assert_nothing_left(private, group.pids)


def test_another_mesh_waits_for_the_devices(
    registry: GroupRegistry, private: Path, tmp_path: Path
) -> None:
    two = stub_spec(tmp_path / "two")
    one = stub_spec(tmp_path / "one", ranks=1)

    async def job(spec_is_two: bool) -> WorkerGroup:
        async with registry.lease(two if spec_is_two else one) as group:
            with lone_parcel() as parcel:
                request = stub_request(parcel, "sleep:10")
                await group.run(request, parcel.fds)
                assert torch.equal(parcel.tensor(request.result), torch.arange(4.0) + 1)
            return group

    async def both() -> list[WorkerGroup]:
        first = asyncio.create_task(job(True))
        same = asyncio.create_task(job(True))
        await asyncio.sleep(0)
        second = asyncio.create_task(job(False))
        return [await first, await same, await second]

    first, same, second = asyncio.run(both())
    assert first is same  # two leases at once start one group
    assert first.has_ended
    assert [pid for pid in first.pids if is_running(pid)] == []
    assert registry.running_groups() == (second,)
    registry.stop_all()
    assert_nothing_left(private, second.pids)


def test_stop_ends_a_group_in_the_middle_of_a_job(
    registry: GroupRegistry, private: Path, tmp_path: Path
) -> None:
    with leased(registry, stub_spec(tmp_path / "log", ranks=1)) as group:
        stopper = threading.Timer(0.3, registry.stop_all)
        stopper.start()
        with pytest.raises((WorkerDied, JobCancelled)):
            ask(group, "sleep:400")
        stopper.join()
        group.stop()  # again
    assert_nothing_left(private, group.pids)


def test_start_that_fails_says_why_and_leaves_nothing(
    registry: GroupRegistry, private: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    spec = stub_spec(log, build="build_fails")
    with pytest.raises(WorkerStartError, match=r"(?s)The end of .*this rank cannot start"):
        leased(registry, spec).__enter__()
    assert_nothing_left(private)
    assert "this rank cannot start" in log.read_text()


def test_start_has_a_deadline(registry: GroupRegistry, private: Path, tmp_path: Path) -> None:
    spec = stub_spec(tmp_path / "log", ranks=1, build="build_slowly", start_timeout_s=0.7)
    started = time.monotonic()
    with pytest.raises(WorkerStartError, match=r"within 0\.7 s; rank 0"):
        leased(registry, spec).__enter__()
    assert time.monotonic() - started < 8
    assert_nothing_left(private)


def test_start_with_a_python_that_is_not_there(
    registry: GroupRegistry, private: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerStartError, match="launched"):
        leased(registry, replace(stub_spec(tmp_path / "log"), python="/nonexistent")).__enter__()
    assert_nothing_left(private)
    assert len(os.listdir("/proc/self/fd")) == before


def reached(private: Path) -> dict[str, Callable[[], bool]]:
    """Moments of a start, as seen from outside."""
    return {
        "at once": lambda: True,
        "launcher": lambda: len(processes_naming(str(private))) >= 1,
        "ranks": lambda: len(processes_naming(str(private))) >= 3,
    }


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("at once", "interrupted"),
        ("launcher", "cancelled"),
        ("launcher", "interrupted"),
        ("ranks", "interrupted"),
        ("ranks", "cancelled"),
    ],
)
def test_interrupted_start_leaves_nothing(
    registry: GroupRegistry, private: Path, tmp_path: Path, moment: str, how: str
) -> None:
    has_come = reached(private)[moment]
    before = len(os.listdir("/proc/self/fd"))
    spec = stub_spec(tmp_path / "log", build="build_slowly")

    def check() -> None:
        if has_come():
            raise Interrupted

    async def enter() -> None:
        async with registry.lease(spec):
            pass

    async def enter_and_cancel() -> None:
        start = asyncio.create_task(enter())
        while not has_come():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.01)
        start.cancel()
        await start

    started = time.monotonic()
    interrupted = how == "interrupted"
    with pytest.raises(Interrupted if interrupted else asyncio.CancelledError):
        asyncio.run(interrupted_by(check, enter()) if interrupted else enter_and_cancel())
    assert_nothing_left(private)
    assert time.monotonic() - started < 60
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, 2)
