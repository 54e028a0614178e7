"""Concurrent requests on two pipeline stages: one run of the real model, as the sampler node has it done.

Covered: equal results alone and joined, a bad request and a killed rank among them, and two sampler nodes of a graph in
a real ComfyUI. Not covered: who joins whom, and leaving (test_joining.py).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import assert_counted, group_of, latent_of, succeed
from graphs import node, sampled_latent
from torch import Tensor

from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.default import WorkerGroups, build_groups
from comfy_wan_dist.group.queue import Piece
from comfy_wan_dist.group.scheduler import Outcome
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import ModelSpec, Progress
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import DeviceList
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import (
    GUIDANCE,
    SIGMAS,
    Inputs,
    Schedule,
    build_request,
    model_spec,
    relative_error,
)

LIMIT = 1e-5
"""Of the largest value, float32: a prompt is projected together with others' here."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    write_transformer(path, TINY_TRANSFORMER, seed=1)
    return model_spec(path)


@pytest.fixture(scope="module")
def served() -> Iterator[WorkerGroups]:
    served = build_groups()
    yield served
    served.stop_all()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of all jobs that groups are given."""
    seen: list[str] = []
    run = WorkerGroup.run

    async def note(self: WorkerGroup, request: Any, *args: Any, **options: Any) -> Any:
        seen.append(request.id)
        return await run(self, request, *args, **options)

    monkeypatch.setattr(WorkerGroup, "run", note)
    return seen


def inputs(
    seed: int, *, frame_mask: tuple[float, ...] | None, solver: str, width: int = 6
) -> Inputs:
    """Noise and prompts of one sample; guided if its frames are not all generated."""
    generator = torch.Generator().manual_seed(seed)
    size = (1, TINY_TRANSFORMER.in_dim, 3, 4, width)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    text = (1, 24, TINY_TRANSFORMER.text_dim)
    given = Inputs(
        noisy=noise(*size),
        cond=noise(*text),
        step_noise=noise(len(SIGMAS) - 2, *size) if solver == "lcm" else None,
    )
    if frame_mask is None:
        return given
    mask = torch.tensor(frame_mask).view(1, 1, 3, 1, 1).expand(1, 1, *size[2:]).contiguous()
    return replace(
        given, uncond=noise(*text), clean=noise(*size), mask=mask, frame_mask=mask.mean((1, 3, 4))
    )


@dataclass
class SamplerNode:
    """A sampler node with one sample."""

    served: WorkerGroups
    model: ModelSpec
    folder: Path
    id: str
    inputs: Inputs
    solver: str
    sigmas: tuple[float, ...] = SIGMAS
    on_progress: Callable[[Progress], None] = lambda progress: None

    async def run(self) -> tuple[Outcome, Tensor]:
        plane = LaunchSpec(
            degrees=MeshDegrees(pp=2),
            devices=DeviceList(kind="cpu", indices=(0, 1)),
            log_path=self.folder / "log",
        )
        schedule = Schedule(solver=self.solver, sigmas=self.sigmas, guidance=GUIDANCE)
        request, tensors = build_request(self.model, self.inputs, schedule, mesh="pp2")
        scheduler = self.served.scheduler
        with scheduler.parcel() as parcel:
            for tensor in tensors[:-1]:
                parcel.pack([tensor])  # the n-th tensor in the n-th buffer, as the request says
            parcel.reserve(tensors[-1].shape, torch.float32)
            (outcome,) = await scheduler.run(
                [plane],
                [Piece(request=replace(request, id=self.id), cost=1.0, most_samples=2)],
                parcel.fds,
                on_progress=lambda _, progress: self.on_progress(progress),
            )
            return outcome, parcel.tensor(request.result)


def run(*callers: SamplerNode) -> list[Any]:
    """All at the same time: (outcome, latent) or the error of each."""

    async def main() -> list[Any]:
        return await asyncio.gather(*(caller.run() for caller in callers), return_exceptions=True)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("solver", "frame_masks"),
    [("euler", (None, None)), ("lcm", ((0.0, 1.0, 1.0), (0.0, 0.5, 1.0)))],
    ids=["unguided", "guided lcm, different frames given"],
)
def test_joined_requests_give_what_each_gives_alone(
    served: WorkerGroups,
    model: ModelSpec,
    tmp_path: Path,
    jobs: list[str],
    solver: str,
    frame_masks: tuple[Any, Any],
) -> None:
    callers = [
        SamplerNode(
            served, model, tmp_path, name, inputs(i, frame_mask=mask, solver=solver), solver
        )
        for i, (name, mask) in enumerate(zip("ab", frame_masks, strict=True))
    ]
    alone = [run(caller)[0][1].clone() for caller in callers]
    assert jobs == ["a", "b"]
    joined = run(*callers)
    assert jobs[2:] == ["a+b"]
    for (outcome, latent), expected in zip(joined, alone, strict=True):
        assert outcome.requests == 2
        assert [answer.rank for answer in outcome.answers] == [0, 1]
        error = relative_error(latent, expected)
        print(f"{solver}: error {error:.1e}, bit-equal {torch.equal(latent, expected)}")
        assert error <= LIMIT
    assert relative_error(alone[0], alone[1]) > 0.1


def test_requests_of_unequal_shape_are_not_joined(
    served: WorkerGroups, model: ModelSpec, tmp_path: Path, jobs: list[str]
) -> None:
    results = run(
        *(
            SamplerNode(
                served,
                model,
                tmp_path,
                name,
                inputs(1, frame_mask=None, solver="euler", width=width),
                "euler",
            )
            for name, width in [("a", 6), ("b", 8)]
        )
    )
    assert sorted(jobs) == ["a", "b"]
    assert [outcome.requests for outcome, _ in results] == [1, 1]


def test_bad_numbers_of_one_do_not_harm_the_other(
    served: WorkerGroups, model: ModelSpec, tmp_path: Path, jobs: list[str]
) -> None:
    good, bad = (inputs(seed, frame_mask=None, solver="euler") for seed in (1, 2))
    bad.cond[0, 3, 5] = float("nan")
    callers = [
        SamplerNode(served, model, tmp_path, name, given, "euler")
        for name, given in [("good", good), ("bad", bad)]
    ]
    ((_, expected),) = run(callers[0])
    pids = [group.pids for group in served.registry.running_groups()]
    (outcome, latent), error = run(*callers)
    assert isinstance(error, ConfigError)
    assert outcome.requests == 1
    assert torch.equal(latent, expected)
    assert jobs == ["good", "good+bad", "good", "bad"]
    assert [group.pids for group in served.registry.running_groups()] == pids


def test_killed_rank_costs_each_a_retry_alone(
    served: WorkerGroups, model: ModelSpec, tmp_path: Path, jobs: list[str]
) -> None:
    """The run is long enough to be killed in."""
    sigmas = tuple(1 - step / 40 for step in range(41))

    def kill(progress: Progress) -> None:
        if progress.phase == "sample" and progress.id == "a+b" and not killed:
            (group,) = served.registry.running_groups()
            killed.append(group.pids[2])
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    callers = [
        SamplerNode(
            served,
            model,
            tmp_path,
            name,
            inputs(seed, frame_mask=None, solver="euler"),
            "euler",
            sigmas=sigmas,
            on_progress=kill,
        )
        for seed, name in enumerate("ab")
    ]
    results = run(*callers)
    assert killed
    assert jobs == ["a+b", "a", "b"]
    for caller, (outcome, latent) in zip(callers, results, strict=True):
        assert outcome.requests == 1
        ((_, again),) = run(caller)
        assert torch.equal(latent, again)


def test_two_sampler_nodes_of_a_graph_share_a_run(comfy: ComfyServer) -> None:
    graphs.write_files(comfy.base)
    seeds = [zlib.crc32(b"joined") + index for index in (0, 1)]
    place = {"mesh": "pp2", "steps": 8}
    alone = [
        latent_of(comfy, succeed(comfy, sampled_latent(seed=seed, devices="cpu:2", **place)))
        for seed in seeds
    ]
    pids = group_of(comfy).pids
    # The same group, but a graph that is not answered from the cache.
    graph = sampled_latent(seed=seeds[0], devices="cpu:3", **place)
    graph["second"] = node("WanDistSampler", **{**graph["sampler"]["inputs"], "seed": seeds[1]})
    graph["save second"] = graphs.save_latent("second")
    graph["text"] = node("PreviewAny", source=["second", 1])
    seen = len(comfy.log)
    result = succeed(comfy, graph)
    shared = re.findall(r"SampleRequest on mesh pp2, 2 requests in one run", comfy.log[seen:])
    assert len(shared) == 2
    assert "2 requests in one run" in result.outputs["text"]["text"][0]
    for name, save, expected in [
        ("sampler", "save", alone[0]),
        ("second", "save second", alone[1]),
    ]:
        assert_counted(result, name, 8)
        error = relative_error(latent_of(comfy, result, save), expected)
        print(f"{name}: error {error:.1e}")
        assert error <= LIMIT
    assert group_of(comfy).pids == pids
