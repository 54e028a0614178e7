"""Requests that share a run: who joins whom, what each gets, and that each can be lost without harm to the others.

The scheduler is the real one; the plane is no process but computes results out of shared memory as ranks do. Which
requests may is in test_shared_requests.py, the real model in test_joined_runs.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from group_kit import Interrupted
from joining_kit import (
    STEPS,
    make_request,
    make_tensors,
    sampled,
)
from torch import Tensor

from comfy_wan_dist.group.queue import SETTLE_S, Piece
from comfy_wan_dist.group.registry import GroupRegistry
from comfy_wan_dist.group.scheduler import Outcome, Scheduler
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.ipc.errors import (
    ConfigError,
    InsufficientMemoryError,
    RemoteError,
    WorkerDied,
    WorkerStartError,
    WorkerStopped,
    WorkerTimeout,
)
from comfy_wan_dist.ipc.messages import (
    Done,
    Progress,
    Request,
    SampleRequest,
    TensorRef,
    tensor_refs,
)
from comfy_wan_dist.ipc.shared import map_buffer
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import DeviceList
from devtools.leasing import interrupted_by

STEP_S = 0.03
STEP_LIMIT_S = 5.0
SPOILT = 77.0


# ---- planes and callers


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
        plane = self.spec.devices.indices[0]
        self.planes.begun.append((request.id, plane))
        assert plane not in self.planes.working, "two runs on one plane"
        self.planes.working.add(plane)
        try:
            for step in range(STEPS):
                await asyncio.sleep(STEP_S)
                on_progress(Progress(id=request.id, phase="sample", done=step + 1, total=STEPS))
                self.planes.at_step(request.id, step)
            if (error := self.planes.behaviour(self.spec, request.id)) is not None:
                raise error
            if isinstance(request, SampleRequest):
                buffers = [map_buffer(fd) for fd in fds]
                named = tensor_refs(request)
                tensors = {name: buffers[ref.buffer].tensor(ref) for name, ref in named.items()}
                tensors.pop("result").copy_(sampled(tensors))
        except BaseException:
            # As the client does: it returns only when no rank works on the job any more.
            await asyncio.sleep(STEP_S)
            raise
        finally:
            self.planes.working.discard(plane)
        self.planes.ended.append((request.id, plane))
        return (Done(id=request.id, rank=0, seconds=0, bytes_read=0, ledger=()),)


@dataclass
class FakePlanes:
    """Stands for the registry."""

    behaviour: Callable[[LaunchSpec, str], Exception | None] = lambda spec, id: None
    at_step: Callable[[str, int], None] = lambda id, step: None
    fails_to_start: Callable[[LaunchSpec], bool] = lambda spec: False
    start_s: float = 0.0
    begun: list[tuple[str, int]] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)
    working: set[int] = field(default_factory=set)
    running: dict[Any, FakeGroup] = field(default_factory=dict)

    def running_groups(self) -> tuple[FakeGroup, ...]:
        return tuple(self.running.values())

    @asynccontextmanager
    async def lease(self, spec: LaunchSpec) -> AsyncIterator[FakeGroup]:
        ready = time.monotonic() + self.start_s
        while time.monotonic() < ready:
            await asyncio.sleep(STEP_S)
        if self.fails_to_start(spec):
            raise WorkerStartError(f"plane {spec.devices.indices}")
        yield self.running.setdefault(spec.key, FakeGroup(spec, self))

    def runs(self) -> list[str]:
        return [id for id, _ in self.begun]


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
    scheduler.call_off_waiting()  # closes its pool


def stages(count: int = 1, *, kind: str = "cpu") -> tuple[LaunchSpec, ...]:
    """Planes of two stages each."""
    return tuple(
        LaunchSpec(
            degrees=MeshDegrees(pp=2),
            devices=DeviceList(kind=cast(Any, kind), indices=(2 * index, 2 * index + 1)),
            log_path=Path("log"),
        )
        for index in range(count)
    )


@dataclass
class SamplerNode:
    """A sampler node with one piece. `seed` and the options of make_tensors say what it samples."""

    scheduler: Scheduler
    id: str
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    planes: tuple[LaunchSpec, ...] = field(default_factory=stages)
    cost: float = 1.0
    most_samples: int = 2
    check: Callable[[], None] = lambda: None
    progress: list[int] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)
    spoilt: Tensor | None = None

    async def run(self) -> Outcome:
        tensors = make_tensors(sum(self.id.encode()), **self.options)
        with self.scheduler.parcel() as parcel:
            request = replace(make_request(self.id, tensors, parcel), **self.changes)
            parcel.tensor(request.result).fill_(SPOILT)
            piece = Piece(request=request, cost=self.cost, most_samples=self.most_samples)
            run = self.scheduler.run(
                self.planes,
                [piece],
                parcel.fds,
                on_progress=lambda _, progress: self.progress.append(progress.done),
            )
            try:
                (outcome,) = await interrupted_by(self._check, run)
            except BaseException:
                # From here on nobody may write to it, nor read what it held.
                self.spoilt = parcel.tensor(request.result).fill_(SPOILT)
                for fd in parcel.fds:
                    buffer = map_buffer(fd)
                    ref = TensorRef(buffer=0, offset=0, dtype="uint8", shape=(buffer.size,))
                    buffer.tensor(ref).fill_(255)
                self.spoilt.fill_(SPOILT)
                raise
            assert torch.equal(parcel.tensor(request.result), sampled(tensors)), self.id
        return outcome

    def _check(self) -> None:
        self.checks.append(time.monotonic())
        self.check()

    def is_untouched(self) -> bool:
        return self.spoilt is not None and bool((self.spoilt == SPOILT).all())


def together(*callers: SamplerNode) -> list[Any]:
    """All in one event loop, as nodes of a graph; their outcomes or errors."""

    async def main() -> list[Any]:
        return await asyncio.gather(*(caller.run() for caller in callers), return_exceptions=True)

    return asyncio.run(main())


# ---- who shares


def test_two_nodes_share_a_run_and_each_hears_all_of_it(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    callers = [SamplerNode(scheduler, "a"), SamplerNode(scheduler, "b")]
    outcomes = together(*callers)
    assert fake.runs() == ["a+b"]
    for caller, outcome in zip(callers, outcomes, strict=True):
        assert outcome.requests == 2
        assert [answer.id for answer in outcome.answers] == ["a+b"]
        assert caller.progress == [1, 2, 3, 4]
        gaps = [
            after - before for before, after in zip(caller.checks, caller.checks[1:], strict=False)
        ]
        assert len(caller.checks) >= 4
        assert max(gaps) < 0.5  # 50 ms on an idle machine


def test_node_that_comes_a_moment_later_shares_the_run(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    scheduler._queue._settle_s = 0.4  # on a busy machine a moment may be long

    async def main() -> None:
        first = asyncio.create_task(SamplerNode(scheduler, "a").run())
        await asyncio.sleep(0.02)
        await asyncio.gather(first, SamplerNode(scheduler, "b").run())

    asyncio.run(main())
    assert fake.runs() == ["a+b"]


def test_lone_request_is_run_as_it_is(scheduler: Scheduler, fake: FakePlanes) -> None:
    (outcome,) = together(SamplerNode(scheduler, "a"))
    assert fake.runs() == ["a"]
    assert outcome.requests == 1


@pytest.mark.parametrize(
    "other",
    [
        {"options": {"latent": (3, 2, 4, 6)}},
        {"options": {"tokens": 6}},
        {"options": {"leave_out": ("uncond",)}},
        {"changes": {"guidance": 4.0}},
        {"most_samples": 0},
        {"options": {"batch": 2}},
    ],
)
def test_requests_that_do_not_go_together_take_turns(
    scheduler: Scheduler, fake: FakePlanes, other: dict[str, Any]
) -> None:
    outcomes = together(SamplerNode(scheduler, "a"), SamplerNode(scheduler, "b", **other))
    assert sorted(fake.runs()) == ["a", "b"]
    assert [outcome.requests for outcome in outcomes] == [1, 1]


def test_longest_waiting_join_first_as_far_as_there_is_room(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    together(
        SamplerNode(scheduler, "a", most_samples=3),
        SamplerNode(scheduler, "b", most_samples=3, options={"batch": 2}),
        SamplerNode(scheduler, "c", most_samples=3, options={"batch": 2}),
        SamplerNode(scheduler, "d", most_samples=3),
        SamplerNode(scheduler, "e", most_samples=3, cost=2),
    )
    assert fake.runs() == ["e+a+d", "b", "c"]


def test_idle_planes_go_before_sharing_and_are_filled_alike(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    def callers(names: str) -> list[SamplerNode]:
        return [SamplerNode(scheduler, name, planes=stages(2), most_samples=3) for name in names]

    together(*callers("ab"))
    assert sorted(fake.begun) == [("a", 0), ("b", 2)]
    fake.begun.clear()
    outcomes = together(*callers("abcd"))
    assert sorted(fake.begun) == [("a+c", 0), ("b+d", 2)]
    assert [outcome.plane for outcome in outcomes] == [*stages(2), *stages(2)]


def test_node_of_one_plane_joins_there_only(scheduler: Scheduler, fake: FakePlanes) -> None:
    first, second = stages(2)
    together(
        SamplerNode(scheduler, "a", planes=(first, second)),
        SamplerNode(scheduler, "b", planes=(second,)),
        SamplerNode(scheduler, "c", planes=(second,)),
    )
    assert sorted(fake.begun) == [("a", 0), ("b+c", 2)]


def test_threads_with_loops_of_their_own_share_a_run(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    scheduler._queue._settle_s = 0.4
    outcomes: dict[str, Any] = {}
    callers = [SamplerNode(scheduler, name, most_samples=3) for name in "abc"]

    def node(caller: SamplerNode) -> None:
        outcomes[caller.id] = together(caller)[0]

    threads = [threading.Thread(target=node, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(fake.runs()) == 1
    for caller in callers:
        assert outcomes[caller.id].requests == 3
        assert caller.progress == [1, 2, 3, 4]


# ---- leaving


@pytest.mark.parametrize("how", ["interrupt", "cancel"])
@pytest.mark.parametrize("moment", ["start", "run"])
def test_follower_leaves_alone_and_the_run_goes_on(
    scheduler: Scheduler, fake: FakePlanes, how: str, moment: str
) -> None:
    """At the start of the group its place is free again; in a run its part is computed and dropped."""
    fake.start_s = 0.3
    due: list[bool] = []

    def check() -> None:
        if how == "interrupt" and due:
            raise Interrupted

    leaver = SamplerNode(scheduler, "b", most_samples=3, check=check)
    others = [SamplerNode(scheduler, name, most_samples=3) for name in "ac"]

    async def main() -> list[Outcome]:
        first, leaving, third = (
            asyncio.create_task(caller.run()) for caller in (others[0], leaver, others[1])
        )
        await wait_for(lambda: scheduler._queue._busy if moment == "start" else fake.begun)
        due.append(True)
        if how == "cancel":
            leaving.cancel()
        with pytest.raises(Interrupted if how == "interrupt" else asyncio.CancelledError):
            await leaving
        assert not fake.ended
        return [await first, await third]

    outcomes = asyncio.run(main())
    assert fake.runs() == ["a+c" if moment == "start" else "a+b+c"]
    assert [outcome.requests for outcome in outcomes] == [2 if moment == "start" else 3] * 2
    assert leaver.is_untouched()


async def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + STEP_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("turn", "cancel"),
        *((moment, how) for moment in ("start", "run") for how in ("interrupt", "cancel")),
    ],
)
def test_leader_that_leaves_does_not_take_the_others_down(
    scheduler: Scheduler, fake: FakePlanes, how: str, moment: str
) -> None:
    """They are queued again and share the next run; one loss of their plane is still made good."""
    fake.start_s = 0.2 if moment == "start" else 0.0
    losses = [WorkerDied("once")]
    fake.behaviour = lambda spec, id: losses.pop() if id == "b+c" and losses else None
    due: list[bool] = []

    def check() -> None:
        if how == "interrupt" and due:
            raise Interrupted

    leader = SamplerNode(scheduler, "a", most_samples=3, check=check)
    others = [SamplerNode(scheduler, name, most_samples=3) for name in "bc"]

    async def main() -> list[Outcome]:
        leading, *following = (asyncio.create_task(c.run()) for c in (leader, *others))
        if moment == "turn":  # the turn is there, and nobody has seen it
            await wait_for(lambda: len(scheduler._queue._waiting) == 3)
            scheduler._queue._settle_s = 0.0
            scheduler._queue.dispatch()
            scheduler._queue._settle_s = SETTLE_S
        await wait_for(lambda: fake.begun if moment == "run" else scheduler._queue._busy)
        due.append(True)
        if how == "cancel":
            leading.cancel()
        with pytest.raises(Interrupted if how == "interrupt" else asyncio.CancelledError):
            await leading
        return list(await asyncio.gather(*following))

    outcomes = asyncio.run(main())
    first = ["a+b+c"] * (moment == "run")
    assert fake.runs()[: len(first) + 1] == [*first, "b+c"]
    assert sorted(fake.runs()[len(first) + 1 :]) == ["b", "c"]
    assert [outcome.requests for outcome in outcomes] == [1, 1]
    assert leader.is_untouched()


def test_each_of_many_that_leave_at_any_moment_harms_no_other() -> None:
    """Three threads, each with nodes that are cancelled at random; those that stay get what is theirs."""
    fake = FakePlanes()
    scheduler = Scheduler(cast(GroupRegistry, fake))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    ends: Counter[str] = Counter()
    problems: list[BaseException] = []

    async def node(name: str, chance: random.Random) -> None:
        caller = SamplerNode(scheduler, name, most_samples=4, planes=stages(2))
        task = asyncio.create_task(caller.run())
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.4)
            task.cancel()
        try:
            outcome = await task
            ends[f"shared {outcome.requests}"] += 1
        except asyncio.CancelledError:
            ends["left"] += 1
            assert caller.is_untouched()
            left.append(caller)

    left: list[SamplerNode] = []

    def thread(number: int) -> None:
        chance = random.Random(number)

        async def main() -> None:
            await asyncio.gather(*(node(f"{number}{letter}", chance) for letter in "abcdefgh"))

        try:
            asyncio.run(main())
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert not problems
    assert all(caller.is_untouched() for caller in left)
    assert sum(ends.values()) == 24
    assert ends["left"] >= 4
    assert sum(count for end, count in ends.items() if end not in ("left", "shared 1")) >= 4
    assert scheduler._queue._waiting == []
    assert scheduler._queue._busy == {}
    left.clear()
    gc.collect()
    scheduler.call_off_waiting()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- losses and refusals


@pytest.mark.parametrize("loss", [WorkerDied, WorkerTimeout])
def test_lost_plane_costs_each_one_retry_alone(
    scheduler: Scheduler, fake: FakePlanes, loss: type[Exception]
) -> None:
    fake.behaviour = lambda spec, id: loss("gone") if id in ("a+b", "b") else None
    good, bad = together(SamplerNode(scheduler, "a"), SamplerNode(scheduler, "b"))
    assert good.requests == 1
    assert isinstance(bad, loss)
    assert fake.runs() == ["a+b", "a", "b"]


def test_lost_plane_is_left_for_another(scheduler: Scheduler, fake: FakePlanes) -> None:
    both = stages(2)
    fake.behaviour = lambda spec, id: WorkerDied("ill") if spec.key == both[0].key else None
    together(*(SamplerNode(scheduler, name, planes=both) for name in "abcd"))
    assert fake.begun[:2] == [("a+c", 0), ("b+d", 2)]
    assert sorted(fake.begun[2:]) == [("a", 2), ("c", 2)]


def test_group_that_does_not_start_leaves_all_its_members_to_the_others(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    both = stages(2)
    fake.fails_to_start = lambda spec: spec.key == both[0].key
    together(*(SamplerNode(scheduler, name, planes=both) for name in "abcd"))
    assert {plane for _, plane in fake.begun} == {2}
    fake.fails_to_start = lambda spec: True
    outcomes = together(*(SamplerNode(scheduler, name, planes=both) for name in "ab"))
    assert [type(outcome) for outcome in outcomes] == [WorkerStartError] * 2


def test_stopped_group_is_not_tried_again(scheduler: Scheduler, fake: FakePlanes) -> None:
    fake.behaviour = lambda spec, id: WorkerStopped("told to")
    outcomes = together(SamplerNode(scheduler, "a"), SamplerNode(scheduler, "b"))
    assert [type(outcome) for outcome in outcomes] == [WorkerStopped] * 2
    assert fake.runs() == ["a+b"]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("NaN"),
        InsufficientMemoryError("short"),
        RemoteError("odd", rank=0, traceback=""),
    ],
)
@pytest.mark.parametrize("guilty", ["a", "b", "none"])
def test_refused_run_is_done_one_by_one(
    scheduler: Scheduler, fake: FakePlanes, error: Exception, guilty: str
) -> None:
    fake.behaviour = lambda spec, id: error if id in ("a+b", guilty) else None
    outcomes = together(SamplerNode(scheduler, "a"), SamplerNode(scheduler, "b"))
    assert fake.runs() == ["a+b", "a", "b"]
    for name, outcome in zip("ab", outcomes, strict=True):
        if name == guilty:
            assert outcome is error
        else:
            assert outcome.requests == 1


def test_one_that_was_refused_alone_still_has_its_retry(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    errors: dict[str, list[Exception]] = {"a+b": [ConfigError("no")], "a": [WorkerDied("gone")]}
    fake.behaviour = lambda spec, id: errors[id].pop() if errors.get(id) else None
    outcomes = together(SamplerNode(scheduler, "a"), SamplerNode(scheduler, "b"))
    assert [outcome.requests for outcome in outcomes] == [1, 1]
    assert sorted(fake.runs()) == ["a", "a", "a+b", "b"]


def test_request_with_a_wrong_descriptor_harms_nobody_else(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    astray = TensorRef(buffer=99, offset=0, dtype="float32", shape=(1, 5, 8))
    good, bad = together(
        SamplerNode(scheduler, "a"), SamplerNode(scheduler, "b", changes={"cond": astray})
    )
    assert good.requests == 1
    assert isinstance(bad, IndexError)  # of this plane's; ranks answer in their way
    assert fake.runs() == ["a", "b"]


def test_too_little_memory_for_all_leaves_each_to_be_run_alone(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    fake.behaviour = lambda spec, id: InsufficientMemoryError("short") if "+" in id else None
    together(*(SamplerNode(scheduler, name, planes=stages(1, kind="cuda")) for name in "ab"))
    assert fake.runs() == ["a+b", "a", "b"]


def test_stop_calls_off_what_waits_and_not_what_shares_a_run(
    scheduler: Scheduler, fake: FakePlanes
) -> None:
    async def main() -> list[Any]:
        running = [asyncio.create_task(SamplerNode(scheduler, name).run()) for name in "abc"]
        await wait_for(lambda: fake.begun)
        scheduler.call_off_waiting()
        return await asyncio.gather(*running, return_exceptions=True)

    first, second, waiting = asyncio.run(main())
    assert first.requests == second.requests == 2
    assert isinstance(waiting, WorkerStopped)
