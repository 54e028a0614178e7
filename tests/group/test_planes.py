"""Two planes as real groups of two stub ranks each, under one scheduler.

Covered: how well unequal jobs fill them, the death of a rank, errors, and that planes share nothing.
test_scheduler.py has the cases that need no processes, test_data_parallel.py the real model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from group_kit import search_path, stub_spec

from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.default import WorkerGroups, build_groups
from comfy_wan_dist.group.queue import Piece
from comfy_wan_dist.group.scheduler import Outcome
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.ipc.messages import DecodeRequest, Progress, VAESpec
from comfy_wan_dist.ipc.paths import RANK_STORE_NAME
from comfy_wan_dist.ipc.shared import split_ref


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> tuple[LaunchSpec, ...]:
    folder = tmp_path_factory.mktemp("log")
    return tuple(
        stub_spec(folder / f"plane{index}.log", first_device=2 * index) for index in range(2)
    )


@pytest.fixture(scope="module")
def served(planes: tuple[LaunchSpec, ...]) -> Iterator[WorkerGroups]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", search_path())
        served = build_groups()
        yield served
        served.stop_all()


@pytest.fixture
def groups(served: WorkerGroups, planes: tuple[LaunchSpec, ...]) -> list[WorkerGroup]:
    """Both planes, running."""

    async def start(plane: LaunchSpec) -> WorkerGroup:
        async with served.registry.lease(plane) as group:
            return group

    async def both() -> list[WorkerGroup]:
        return list(await asyncio.gather(*(start(plane) for plane in planes)))

    return asyncio.run(both())


class Node:
    """A node's pieces by what the stub runner is to do; each adds 1 to numbers of its own."""

    def __init__(
        self, served: WorkerGroups, planes: Sequence[LaunchSpec], actions: Sequence[str]
    ) -> None:
        self.served, self.planes, self.actions = served, planes, actions
        self.progress: list[tuple[int, Progress, float]] = []

    async def run(self) -> tuple[Outcome, ...]:
        def note(index: int, progress: Progress) -> None:
            self.progress.append((index, progress, time.monotonic()))

        scheduler = self.served.scheduler
        with scheduler.parcel() as parcel:
            count = len(self.actions)
            given = [torch.arange(4.0) + 100 * index for index in range(count)]
            latents = parcel.pack(given)
            results = split_ref(parcel.reserve((count, 4), torch.float32), [1] * count)
            pieces = [
                Piece(
                    request=DecodeRequest(
                        id=f"{id(self)}-{index}",
                        vae=VAESpec(path=action, file_bytes=1, mtime_ns=1, dtype="float32"),
                        latent=latents[index],
                        result=replace(results[index], shape=(4,)),
                    ),
                    cost=float(action.partition(":")[2] or 0),
                )
                for index, action in enumerate(self.actions)
            ]
            outcomes = await scheduler.run(self.planes, pieces, parcel.fds, on_progress=note)
            for result, latent in zip(results, given, strict=True):
                assert torch.equal(parcel.tensor(result)[0], latent + 1)
        for outcome, piece in zip(outcomes, pieces, strict=True):
            assert [answer.id for answer in outcome.answers] == [piece.request.id] * 2
        return outcomes

    async def has_begun(self, running: asyncio.Task[object], *indices: int) -> None:
        while not {*indices} <= {index for index, _, _ in self.progress}:
            assert not running.done(), running
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("as_nodes", [False, True])
def test_six_unequal_jobs_fill_two_planes(
    served: WorkerGroups,
    planes: tuple[LaunchSpec, ...],
    groups: list[WorkerGroup],
    as_nodes: bool,
) -> None:
    """In the order of submission they would take a third longer than the ideal split."""
    lengths = [8, 8, 8, 8, 16, 48]
    actions = [f"sleep:{length}" for length in lengths]

    async def main() -> list[Outcome]:
        parts = [[action] for action in actions] if as_nodes else [actions]
        nodes = [Node(served, planes, part).run() for part in parts]
        return [outcome for outcomes in await asyncio.gather(*nodes) for outcome in outcomes]

    started = time.monotonic()
    outcomes = asyncio.run(main())
    elapsed = time.monotonic() - started
    work = [outcome.answers[0].seconds for outcome in outcomes]
    ideal = ideal_split(work)
    print(f"{elapsed:.2f} s, ideal {ideal:.2f} s, ratio {elapsed / ideal:.3f}")
    assert elapsed <= 1.15 * ideal
    used = {outcome.plane.key for outcome in outcomes}
    assert used == {plane.key for plane in planes}


def ideal_split(seconds: Sequence[float]) -> float:
    """When two planes would be ready at the earliest, from what the ranks say that each job took.

    On a busy machine that is more than they were asked to sleep.
    """
    choices = product((0, 1), repeat=len(seconds))
    first = [
        sum(s for s, side in zip(seconds, sides, strict=True) if side == 0) for sides in choices
    ]
    return min(max(part, sum(seconds) - part) for part in first)


def test_killed_rank_costs_its_plane_one_retry_and_nobody_else_anything(
    served: WorkerGroups, planes: tuple[LaunchSpec, ...], groups: list[WorkerGroup]
) -> None:
    before = [group.pids for group in groups]

    async def main() -> tuple[Outcome, ...]:
        node = Node(served, planes, ["sleep:60", "sleep:40", "sleep:20"])
        running = asyncio.create_task(node.run())
        await node.has_begun(running, 0, 1)
        os.kill(before[1][2], signal.SIGKILL)
        outcomes = await running  # its results are right, or this raises
        steps = [progress.done for index, progress, _ in node.progress if index == 0]
        assert steps == list(range(1, 61))  # unharmed: not one step was done twice
        lost = [progress.done for index, progress, _ in node.progress if index == 1]
        assert lost.count(1) == 2
        assert lost[-1] == 40
        return outcomes

    outcomes = asyncio.run(main())
    assert [planes.index(outcome.plane) for outcome in outcomes] == [0, 0, 1]
    assert groups[0].is_alive
    assert groups[1].has_ended
    now = {group.spec.key: group.pids for group in served.registry.running_groups()}
    assert now[planes[0].key] == before[0]
    assert not set(now[planes[1].key]) & set(before[1])


def test_config_error_is_not_retried_and_the_planes_live_on(
    served: WorkerGroups, planes: tuple[LaunchSpec, ...], groups: list[WorkerGroup]
) -> None:
    async def main() -> None:
        bad = Node(served, planes, ["config:1"])
        good = Node(served, planes, ["sleep:10", "sleep:10"])
        refused, done = await asyncio.gather(bad.run(), good.run(), return_exceptions=True)
        assert isinstance(refused, ModelFileError)
        assert not isinstance(done, BaseException)
        assert len(done) == 2

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 5
    assert all(group.is_alive for group in groups)


def test_cancelled_node_stops_on_both_planes_within_a_step(
    served: WorkerGroups, planes: tuple[LaunchSpec, ...], groups: list[WorkerGroup]
) -> None:
    async def main() -> None:
        node = Node(served, planes, ["sleep:400", "sleep:400", "sleep:400"])
        running = asyncio.create_task(node.run())
        await node.has_begun(running, 0, 1)
        started = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - started < 2
        assert max(index for index, _, _ in node.progress) == 1  # the third never began
        await Node(served, planes, ["echo", "echo"]).run()

    asyncio.run(main())
    assert all(group.is_alive for group in groups)


def test_planes_share_no_folder_store_or_connection(groups: list[WorkerGroup]) -> None:
    folders = [group._processes.folder.path for group in groups]
    assert folders[0] != folders[1]
    for folder in folders:
        assert (folder / RANK_STORE_NAME).is_file()
    owner = {
        inode: index
        for index, group in enumerate(groups)
        for pid in group.pids
        for inode in socket_inodes(pid)
    }
    ends: dict[str, int] = {}
    links: list[tuple[int, str]] = []
    for local, remote, inode in connections():
        if inode in owner:
            ends[local] = owner[inode]
            links.append((owner[inode], remote))
    assert {index for index, _ in links} == {0, 1}  # the ranks of a plane do talk
    for index, remote in links:
        assert ends.get(remote, index) == index


def socket_inodes(pid: int) -> list[str]:
    inodes = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.append(target[len("socket:[") : -1])
    return inodes


def connections() -> list[tuple[str, str, str]]:
    """(local, remote, inode) of every established TCP connection, addresses as the kernel writes them."""
    found = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01":
                found.append((fields[1], fields[2], fields[9]))
    return found


def test_many_pieces_of_one_parcel_find_their_own_tensors(
    served: WorkerGroups, planes: tuple[LaunchSpec, ...], groups: list[WorkerGroup]
) -> None:
    outcomes = asyncio.run(Node(served, planes, ["echo"] * 24).run())
    assert {outcome.plane.key for outcome in outcomes} == {plane.key for plane in planes}
