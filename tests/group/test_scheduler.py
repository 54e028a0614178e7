"""The scheduler alone, on planes that are no processes: order, retry, cancellation, progress.

test_planes.py does the same with real groups where processes matter.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from group_kit import Interrupted, empty_request, stub_spec
from hypothesis import given
from hypothesis import strategies as st

from comfy_wan_dist.group.progress import overall
from comfy_wan_dist.group.queue import Piece
from comfy_wan_dist.group.registry import GroupRegistry
from comfy_wan_dist.group.scheduler import Outcome, Scheduler
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.ipc.errors import (
    ConfigError,
    InsufficientMemoryError,
    MeshError,
    RemoteError,
    WorkerDied,
    WorkerStartError,
    WorkerStopped,
    WorkerTimeout,
)
from comfy_wan_dist.ipc.messages import Done, Progress, Request
from comfy_wan_dist.mesh.choice import piece_sizes
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.flops import rank_flops, vae_flops
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from comfy_wan_dist.mesh.workload import Workload
from devtools.leasing import interrupted_by

TICK_S = 0.01
Behaviour = Callable[[LaunchSpec, str], Exception | None]


@dataclass
class FakeGroup:
    spec: LaunchSpec
    planes: FakePlanes

    async def run(
        self,
        request: Request,
        fds: Sequence[int],
        *,
        on_progress: Callable[[Progress], None],
    ) -> tuple[Done, ...]:
        """Takes as many ticks as the id says after its dash."""
        plane, ticks = self.spec.devices.indices[0], int(request.id.partition("-")[2])
        self.planes.log.append(("begin", request.id, plane))
        assert plane not in self.planes.working, "two pieces on one plane"
        self.planes.working.add(plane)
        try:
            until = time.monotonic() + ticks * TICK_S
            while time.monotonic() < until:
                await asyncio.sleep(TICK_S / 2)
            on_progress(Progress(id=request.id, phase="sample", done=ticks, total=ticks))
            if (error := self.planes.behaviour(self.spec, request.id)) is not None:
                raise error
        except BaseException as error:
            self.planes.log.append((type(error).__name__, request.id, plane))
            raise
        finally:
            self.planes.working.discard(plane)
        self.planes.log.append(("end", request.id, plane))
        return (Done(id=request.id, rank=0, seconds=0, bytes_read=0, ledger=()),)


@dataclass
class FakePlanes:
    """Stands for the registry. Groups that were leased once run."""

    behaviour: Behaviour = lambda spec, id: None
    fails_to_start: Callable[[LaunchSpec], bool] = lambda spec: False
    log: list[tuple[str, str, int]] = field(default_factory=list)
    working: set[int] = field(default_factory=set)
    running: dict[Any, FakeGroup] = field(default_factory=dict)

    def running_groups(self) -> tuple[FakeGroup, ...]:
        return tuple(self.running.values())

    @asynccontextmanager
    async def lease(self, spec: LaunchSpec) -> AsyncIterator[FakeGroup]:
        await asyncio.sleep(0)
        if self.fails_to_start(spec):
            raise WorkerStartError(f"plane {spec.devices.indices}")
        yield self.running.setdefault(spec.key, FakeGroup(spec, self))

    def ids(self, what: str, plane: int | None = None) -> list[str]:
        return [id for kind, id, where in self.log if kind == what and plane in (None, where)]


@pytest.fixture
def fake() -> FakePlanes:
    return FakePlanes()


@pytest.fixture
def scheduler(fake: FakePlanes) -> Iterator[Scheduler]:
    scheduler = Scheduler(cast(GroupRegistry, fake))
    yield scheduler
    assert scheduler._queue._waiting == []
    assert scheduler._queue._busy == {}
    assert fake.working == set()


def planes(count: int = 2) -> tuple[LaunchSpec, ...]:
    """One CPU rank each."""
    return tuple(stub_spec(Path("log"), ranks=1, first_device=index) for index in range(count))


def piece(name: str, ticks: int = 1) -> Piece:
    return Piece(request=empty_request(f"{name}-{ticks}"), cost=ticks)


def pieces(*ticks: int) -> list[Piece]:
    return [piece(f"p{index}", length) for index, length in enumerate(ticks)]


def run(
    scheduler: Scheduler,
    work: Sequence[Piece],
    *,
    on: Sequence[LaunchSpec] | None = None,
    **options: Any,
) -> tuple[Outcome, ...]:
    return asyncio.run(scheduler.run(on or planes(), work, **options))


# ---- order


def test_longest_piece_goes_first_and_an_idle_plane_takes_the_next(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    run(scheduler, pieces(2, 3, 4, 80, 6))
    begun = fake.ids("begin")
    assert begun == ["p3-80", "p4-6", "p2-4", "p1-3", "p0-2"]
    assert fake.ids("begin", 0) == ["p3-80"]
    assert fake.ids("begin", 1) == ["p4-6", "p2-4", "p1-3", "p0-2"]


def test_nodes_that_come_one_after_the_other_are_ordered_too(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    async def main() -> None:
        nodes = []
        for ticks in (3, 4, 5, 30):
            nodes.append(asyncio.create_task(scheduler.run(planes(), pieces(ticks))))
            await asyncio.sleep(0.01)
        await asyncio.gather(*nodes)

    asyncio.run(main())
    assert fake.ids("begin") == ["p0-30", "p0-5", "p0-4", "p0-3"]


def test_equal_pieces_keep_their_order_and_a_lone_one_takes_the_first_plane(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    run(scheduler, pieces(2, 2, 2, 2))
    assert fake.ids("begin") == ["p0-2", "p1-2", "p2-2", "p3-2"]
    fake.log.clear()
    for _ in range(3):
        run(scheduler, pieces(1))
    assert fake.ids("begin", 0) == ["p0-1"] * 3


def test_outcomes_are_in_the_order_of_the_pieces(scheduler: Scheduler, fake: FakePlanes) -> None:
    work = pieces(1, 9, 4, 7, 2)
    outcomes = run(scheduler, work)
    assert [outcome.answers[0].id for outcome in outcomes] == [p.request.id for p in work]
    assert fake.ids("end") != [p.request.id for p in work]
    for outcome in outcomes:
        plane = outcome.plane.devices.indices[0]
        assert outcome.answers[0].id in fake.ids("end", plane)


def test_planes_that_share_a_device_take_turns(scheduler: Scheduler, fake: FakePlanes) -> None:
    both = (stub_spec(Path("log"), ranks=2),)

    async def main() -> None:
        await asyncio.gather(
            scheduler.run(planes(), pieces(4, 4)),
            scheduler.run(both, [piece("both", 30)]),
        )

    asyncio.run(main())
    kinds = [kind for kind, _, _ in fake.log]
    at = fake.log.index(("begin", "both-30", 0))
    assert kinds[at + 1] == "end"
    assert kinds[:at].count("begin") == kinds[:at].count("end")


def test_threads_with_loops_of_their_own_share_the_planes(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    outcomes: dict[str, tuple[Outcome, ...]] = {}

    def node(name: str) -> None:
        outcomes[name] = run(scheduler, [piece(f"{name}{index}", 3) for index in range(4)])

    threads = [threading.Thread(target=node, args=(name,)) for name in "abc"]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - started < 5
    for name in "abc":
        assert [o.answers[0].id for o in outcomes[name]] == [f"{name}{i}-3" for i in range(4)]
    assert len(fake.ids("end", 0)) + len(fake.ids("end", 1)) == 12
    assert min(len(fake.ids("end", plane)) for plane in (0, 1)) >= 4


# ---- loss of a plane


@pytest.mark.parametrize("loss", [WorkerDied, WorkerTimeout])
def test_lost_piece_is_run_once_more_on_another_plane(
    scheduler: Scheduler, fake: FakePlanes, loss: type[Exception]
) -> None:
    fake.behaviour = lambda spec, id: (
        loss("gone") if id == "p1-4" and spec.devices.indices == (1,) else None
    )
    outcomes = run(scheduler, pieces(6, 4, 3))
    assert fake.ids(loss.__name__) == ["p1-4"]
    assert fake.ids("begin", 0) == ["p0-6", "p1-4"]
    assert fake.ids("begin", 1) == ["p1-4", "p2-3"]  # the plane is used again
    assert [o.plane.devices.indices[0] for o in outcomes] == [0, 0, 1]


def test_lost_piece_waits_for_another_plane_though_its_own_is_idle(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    fake.behaviour = lambda spec, id: WorkerDied("ill") if spec.devices.indices == (1,) else None
    run(scheduler, pieces(12, 4))
    assert fake.ids("begin", 0) == ["p0-12", "p1-4"]
    assert fake.ids("begin", 1) == ["p1-4"]


def test_lost_piece_on_the_only_plane_is_run_once_more_there(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    losses = [WorkerDied("once")]
    fake.behaviour = lambda spec, id: losses.pop() if losses else None
    run(scheduler, pieces(1), on=planes(1))
    assert fake.ids("begin") == ["p0-1", "p0-1"]


def test_second_loss_is_raised_and_harms_no_other_node(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    fake.behaviour = lambda spec, id: WorkerDied("always") if id.startswith("bad") else None

    async def main() -> Sequence[Any]:
        return await asyncio.gather(
            scheduler.run(planes(), [piece("bad", 2)]),
            scheduler.run(planes(), pieces(5, 5, 5)),
            return_exceptions=True,
        )

    bad, good = asyncio.run(main())
    assert isinstance(bad, WorkerDied)
    assert len(good) == 3
    assert fake.ids("begin").count("bad-2") == 2


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no"),
        MeshError("no"),
        InsufficientMemoryError("no"),
        RemoteError("no", rank=0, traceback=""),
        WorkerStopped("told to"),
    ],
)
def test_other_errors_are_raised_at_once_and_cancel_the_nodes_other_pieces(
    scheduler: Scheduler, fake: FakePlanes, error: Exception
) -> None:
    fake.behaviour = lambda spec, id: error if id == "p1-3" else None
    started = time.monotonic()
    with pytest.raises(type(error)):
        run(scheduler, pieces(300, 3, 2, 1))
    assert time.monotonic() - started < 2
    assert fake.ids("begin").count("p1-3") == 1
    assert fake.ids("CancelledError", 0) == ["p0-300"]
    assert fake.ids("end") == [] or fake.ids("end") == ["p2-2"]


def test_plane_that_does_not_start_leaves_its_work_to_the_others(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    fake.fails_to_start = lambda spec: spec.devices.indices == (1,)
    run(scheduler, pieces(3, 3, 3, 3))
    assert len(fake.ids("end", 0)) == 4
    fake.fails_to_start = lambda spec: True
    with pytest.raises(WorkerStartError):
        run(scheduler, pieces(3, 3))
    with pytest.raises(WorkerStartError):
        run(scheduler, pieces(1), on=planes(1))


# ---- interrupt and cancellation


@pytest.mark.parametrize("held_by_another", [False, True])
def test_interrupt_cancels_all_pieces_of_the_node_and_no_others(
    scheduler: Scheduler, fake: FakePlanes, held_by_another: bool
) -> None:
    """The interrupt is heard in the queue as well, and only once: ComfyUI forgets it when it raises."""
    begun = time.monotonic()
    interrupts = [Interrupted()]

    def check() -> None:
        if time.monotonic() - begun > 0.3 and interrupts:
            raise interrupts.pop()

    async def main() -> list[Any]:
        other = asyncio.create_task(scheduler.run(planes(), pieces(*[90, 90] * held_by_another)))
        await asyncio.sleep(0.1)
        node = asyncio.create_task(
            interrupted_by(
                check,
                scheduler.run(planes(), [piece(f"node{index}", 80 - index) for index in range(5)]),
            )
        )
        with pytest.raises(Interrupted):
            await node
        assert time.monotonic() - begun < 0.6
        assert not any("node" in id for id in fake.ids("end"))
        return [await other]

    asyncio.run(main())
    assert len(fake.ids("end")) == 2 * held_by_another


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.2])
def test_asyncio_cancellation_cancels_all_pieces(
    scheduler: Scheduler, fake: FakePlanes, times: int, after_s: float
) -> None:
    async def main() -> None:
        node = asyncio.create_task(scheduler.run(planes(), pieces(200, 200, 200)))
        await asyncio.sleep(after_s)
        for _ in range(times):
            node.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await node
        assert len(asyncio.all_tasks()) == 1

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 1.5
    assert fake.ids("end") == []


def test_stop_calls_off_what_waits(scheduler: Scheduler, fake: FakePlanes) -> None:
    async def main() -> None:
        first = asyncio.create_task(scheduler.run(planes(1), [piece("first", 20)]))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(scheduler.run(planes(1), [piece("second", 1)]))
        await asyncio.sleep(0.05)
        scheduler.call_off_waiting()
        with pytest.raises(WorkerStopped):
            await second
        await first

    asyncio.run(main())
    assert fake.ids("begin") == ["first-20"]


# ---- progress, pieces, cost


def said(phase: str, done: int, total: int) -> Progress:
    return Progress(id="x", phase=phase, done=done, total=total)


def test_progress_is_the_sum_of_the_pieces() -> None:
    assert overall([said("sample", 2, 5)]) == (2, 5)
    assert overall([said("load", 2**33, 2**34)]) == (50, 100)
    assert overall([None, said("sample", 2, 5), said("sample", 4, 5)]) == (6, 15)
    assert overall([said("load", 1, 2), said("sample", 2, 5)]) == (2, 10)
    assert overall([said("load", 1, 2), None]) == (25, 100)


def test_progress_of_each_piece_carries_its_number(scheduler: Scheduler) -> None:
    seen: list[tuple[int, int]] = []
    run(
        scheduler,
        pieces(2, 5, 3),
        on_progress=lambda index, progress: seen.append((index, progress.total)),
    )
    assert sorted(seen) == [(0, 2), (1, 5), (2, 3)]


@given(batch=st.integers(1, 40), dp=st.integers(1, 8), pp=st.integers(1, 3))
def test_pieces_hold_the_batch_and_feed_each_plane(batch: int, dp: int, pp: int) -> None:
    sizes = piece_sizes(MeshDegrees(dp=dp, pp=pp), batch=batch)
    assert sum(sizes) == batch
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) >= min(dp, batch)
    assert dp > 1 or sizes == (batch,)
    assert pp == 1 or len(sizes) <= dp


def test_cost_of_a_job_grows_as_its_work_does() -> None:
    shape = WanShape(dim=3072, ffn_dim=14336, num_layers=30, in_dim=48, out_dim=48)
    grid = LatentGrid(frames=31, rows=22, columns=40)

    def cost(grid: LatentGrid = grid, steps: int = 50, branches: int = 2, batch: int = 1) -> float:
        job = Workload(shape=shape, grid=grid, steps=steps, guided=branches == 2, batch=batch)
        return rank_flops(job, MeshDegrees(), 0).job(steps)

    # The text is done once in a job.
    assert cost(steps=25) * 2 == pytest.approx(cost(), rel=1e-3)
    assert cost(branches=1) * 2 == cost() == pytest.approx(cost(batch=2) / 2, rel=1e-3)
    twice = replace(grid, frames=62)
    assert 2.4 < cost(twice) / cost() < 4  # linear layers and squared attention
    one_forward = cost(steps=1, branches=1)
    assert one_forward == pytest.approx(5.0e14, rel=0.2)
    assert 2 < vae_flops(frames=121, height=704, width=1280) / one_forward < 6
