"""Jobs on a living group of two ranks, which all of these tests share: none of them may end it."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from group_kit import (
    Interrupted,
    ask,
    listening_addresses,
    processes_naming,
    search_path,
    stub_request,
    stub_spec,
)

from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.registry import GroupRegistry
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.ipc.errors import (
    ConfigError,
    JobCancelled,
    MeshError,
    ModelFileError,
    RemoteError,
)
from comfy_wan_dist.ipc.messages import Done, Progress
from comfy_wan_dist.ipc.shared import BufferPool, Parcel
from devtools.leasing import interrupted_by, leased, lone_parcel, run_blocking

LOOPBACK = {("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LaunchSpec:
    return stub_spec(tmp_path_factory.mktemp("log") / "group.log")


@pytest.fixture(scope="module")
def registry() -> Iterator[GroupRegistry]:
    registry = GroupRegistry()
    yield registry
    registry.stop_all()


@pytest.fixture(scope="module")
def group(registry: GroupRegistry, spec: LaunchSpec) -> Iterator[WorkerGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", search_path())
        with leased(registry, spec) as group:
            yield group


@pytest.fixture(autouse=True)
def group_survives(group: WorkerGroup) -> Iterator[None]:
    pids = group.pids
    yield
    assert group.is_alive
    assert group.pids == pids
    assert isinstance(ask(group, "echo"), torch.Tensor)


def test_run_returns_what_the_ranks_answer_and_wrote(group: WorkerGroup) -> None:
    async def job() -> tuple[tuple[Done, ...], torch.Tensor]:
        with lone_parcel() as parcel:
            request = stub_request(parcel, "echo", size=1000)
            return await group.run(request, parcel.fds), parcel.tensor(request.result)

    answers, result = asyncio.run(job())
    assert [answer.rank for answer in answers] == [0, 1]
    assert answers[1].bytes_read == 7
    assert answers[0].ledger[0].op == "echo"
    assert torch.equal(result, torch.arange(1000.0) + 1)


def test_results_that_are_kept_do_not_change(group: WorkerGroup) -> None:
    first = ask(group, "echo")
    copy = first.clone()
    first.add_(100)
    ask(group, "echo")
    assert torch.equal(first, copy + 100)


def test_lease_finds_the_running_group(
    registry: GroupRegistry, spec: LaunchSpec, group: WorkerGroup
) -> None:
    async def lease_again() -> WorkerGroup:
        async with registry.lease(spec) as found:
            return found

    assert asyncio.run(lease_again()) is group
    assert registry.running_groups() == (group,)


def test_progress_is_delivered_to_the_caller(group: WorkerGroup) -> None:
    seen: list[tuple[Progress, int]] = []
    with lone_parcel() as parcel:
        request = stub_request(parcel, "sleep:3")
        run_blocking(
            group,
            request,
            parcel,
            on_progress=lambda p: seen.append((p, threading.get_ident())),
        )
    assert seen[-1][0] == Progress(id="job", phase="sample", done=3, total=3)
    assert {thread for _, thread in seen} == {threading.get_ident()}


@pytest.mark.parametrize("way", ["check", "on_progress"])
def test_interrupt_stops_all_ranks_within_a_step(group: WorkerGroup, way: str) -> None:
    steps: list[Progress] = []

    def progress(step: Progress) -> None:
        steps.append(step)
        if way == "on_progress":
            raise Interrupted

    def check() -> None:
        if steps:
            raise Interrupted

    started = time.monotonic()
    with lone_parcel() as parcel:
        run = group.run(stub_request(parcel, "sleep:400"), parcel.fds, on_progress=progress)
        with pytest.raises(Interrupted):
            asyncio.run(interrupted_by(check, run))
    assert time.monotonic() - started < 10  # of 20


@pytest.mark.parametrize("times", [1, 3])
def test_asyncio_cancellation_stops_all_ranks(group: WorkerGroup, times: int) -> None:
    async def main() -> None:
        with lone_parcel() as parcel:
            job = asyncio.create_task(group.run(stub_request(parcel, "sleep:400"), parcel.fds))
            await asyncio.sleep(0.3)
            for _ in range(times):
                job.cancel()
                await asyncio.sleep(0.001)
            with pytest.raises(asyncio.CancelledError):
                await job

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 10


def test_run_does_not_block_the_event_loop(group: WorkerGroup) -> None:
    async def main() -> int:
        with lone_parcel() as parcel:
            job = asyncio.create_task(group.run(stub_request(parcel, "sleep:10"), parcel.fds))
            turns = 0
            while not job.done():
                await asyncio.sleep(0.01)
                turns += 1
            await job
            return turns

    assert asyncio.run(main()) > 15


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ("config:0", ModelFileError, "bad shard on rank 0"),
        ("config:1", ModelFileError, "bad shard on rank 1"),
        ("same", MeshError, "the same everywhere"),
        ("lonely:1", ConfigError, "seen by one rank only"),
    ],
)
def test_errors_keep_their_class(
    group: WorkerGroup, action: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        ask(group, action)
    assert type(caught.value) is kind


def test_unexpected_error_that_was_voted_on_names_its_rank(group: WorkerGroup) -> None:
    with pytest.raises(RemoteError, match="KeyError") as caught:
        ask(group, "odd:1")
    assert caught.value.rank == 1


def test_jobs_run_one_at_a_time_in_order_on_all_ranks(group: WorkerGroup) -> None:
    finished: list[int] = []
    is_running = threading.Event()

    def from_thread() -> None:
        with lone_parcel() as parcel:
            request = stub_request(parcel, "sleep:8", id="thread")
            run_blocking(group, request, parcel, on_progress=lambda _: is_running.set())
        finished.append(-1)

    async def one(number: int) -> None:
        with lone_parcel() as parcel:
            request = stub_request(parcel, "echo", id=f"job {number}")
            await group.run(request, parcel.fds)
            assert torch.equal(parcel.tensor(request.result), torch.arange(4.0) + 1)
        finished.append(number)

    async def many() -> None:
        await asyncio.gather(*(one(number) for number in range(5)))

    thread = threading.Thread(target=from_thread)
    thread.start()
    assert is_running.wait(20)
    asyncio.run(many())
    thread.join(20)
    assert sorted(finished) == [-1, 0, 1, 2, 3, 4]
    assert [number for number in finished if number >= 0] == [0, 1, 2, 3, 4]


def test_a_job_cancelled_in_the_queue_never_runs(group: WorkerGroup) -> None:
    async def main() -> None:
        with lone_parcel() as parcel, lone_parcel() as other:
            first = asyncio.create_task(group.run(stub_request(parcel, "sleep:8"), parcel.fds))
            second = asyncio.create_task(
                group.run(stub_request(other, "exit:0", id="second"), other.fds)
            )
            await asyncio.sleep(0.1)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            assert not first.done()
            await first

    asyncio.run(main())


def test_a_wrong_ref_is_refused_by_the_ranks(group: WorkerGroup) -> None:
    with lone_parcel() as parcel:
        request = stub_request(parcel, "echo")
        with pytest.raises(RemoteError, match="ProtocolError"):
            asyncio.run(group.run(request, parcel.fds[:1]))


def test_twenty_jobs_leak_no_descriptor_on_either_side(group: WorkerGroup) -> None:
    def counts() -> list[int]:
        gc.collect()
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *group.pids)]

    def run_jobs(count: int) -> None:
        for _ in range(count):
            with Parcel(pool) as parcel:
                run_blocking(group, stub_request(parcel, "echo"), parcel)

    pool = BufferPool()  # one, as the scheduler's: ranks keep mappings of the last buffers
    run_jobs(3)
    before = counts()
    run_jobs(20)
    # A leak is one a job; other tests' threads open and close a few of their own.
    assert all(now < then + 10 for now, then in zip(counts(), before, strict=True))
    pool.close()


def test_group_listens_on_loopback_only_and_hides_its_token(group: WorkerGroup) -> None:
    folder = group._processes.folder.path
    pids = processes_naming(str(folder))
    assert set(group.pids) <= set(pids)
    addresses = listening_addresses(pids)
    assert set(addresses) <= LOOPBACK
    assert len(addresses) >= 2  # the ranks' gloo
    token = (folder / "token").read_bytes()
    for pid in pids:
        for place in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{place}", "rb") as file:
                assert token not in file.read()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "token").stat().st_mode & 0o777 == 0o600


def test_a_job_that_was_cancelled_raises_what_the_caller_raised(group: WorkerGroup) -> None:
    """Not the JobCancelled of the ranks, which is for jobs that somebody else stopped."""
    with lone_parcel() as parcel:
        request = stub_request(parcel, "sleep:400")

        async def main() -> None:
            await asyncio.wait_for(group.run(request, parcel.fds), 0.2)

        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(main())
    assert not issubclass(asyncio.TimeoutError, JobCancelled)
