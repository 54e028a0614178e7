"""What may go wrong under a stock sampler whose forwards run in a group: interrupts, a lost rank, a replaced file."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import BackgroundRun, group_of, latent_of, succeed
from graphs import MODEL, MODELS, Graph
from model_graphs import OWN, STOCK, add_both, both_models

from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import mesh_degrees, relative_error

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

LIMIT = 1e-4
SAMPLER, SAVED = f"run {OWN}", f"run {OWN} saved"


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    return comfy


def own(model: str = MODEL, *, size: dict[str, Any] | None = None, **options: Any) -> Graph:
    """A KSampler on the pack's MODEL alone."""
    graph = both_models(model=model, **(size or {}))
    add_both(graph, "run", **options)
    for name in [name for name in graph if STOCK in name]:
        del graph[name]
    return graph


def test_interrupt_ends_a_run_within_a_step_and_the_group_goes_on(
    server: ComfyServer, seed: int
) -> None:
    run = BackgroundRun(server, own(steps=900, seed=seed))
    run.wait_for_steps(3, maximum=900, node=SAMPLER)
    group = group_of(server)
    asked = time.monotonic()
    server.interrupt()
    assert run.result().status == "interrupted"
    assert time.monotonic() - asked < 5
    succeed(server, own(seed=seed))
    assert group_of(server) == group


def test_interrupt_is_heard_while_a_forward_runs(server: ComfyServer, seed: int) -> None:
    """No step begins after it, and the ranks have answered before the node ends."""
    large = {"width": 512, "height": 512, "length": 81, "has_image": False}
    run = BackgroundRun(server, own(size=large, steps=50, seed=seed))
    run.wait_for_steps(1, maximum=50, node=SAMPLER)
    group = group_of(server)
    server.interrupt()
    result = run.result()
    assert result.status == "interrupted"
    steps = [event for event in run.steps(SAMPLER) if event.data["max"] == 50]
    (end,) = result.of_kind("execution_interrupted")
    assert end.at_s - max(event.at_s for event in steps) < 20
    succeed(server, own(seed=seed))
    assert group_of(server) == group


def test_killed_rank_costs_a_restart_and_the_video_is_the_same(
    server: ComfyServer, seed: int
) -> None:
    steps = 40
    graph = own(steps=steps, seed=seed)
    run = BackgroundRun(server, graph)
    run.wait_for_steps(3, maximum=steps, node=SAMPLER)
    group = group_of(server)
    os.kill(group.ranks[1], signal.SIGKILL)
    result = run.result()
    assert result.status == "success", result.error
    assert group.leftovers() == []
    assert not set(group_of(server).pids) & set(group.pids)
    interrupted = latent_of(server, result, SAVED)
    other = own(steps=steps, seed=seed)
    other[SAMPLER]["inputs"]["cfg"] = 5.0000001  # for ComfyUI another prompt
    assert relative_error(interrupted, latent_of(server, succeed(server, other), SAVED)) <= 1e-6


def test_file_replaced_between_two_runs_counts_in_the_second(
    server: ComfyServer, seed: int
) -> None:
    name = "replaced_under_model.safetensors"
    path = server.base / MODELS / name
    results = []
    for number in (1, 2):
        write_transformer(path, TINY_TRANSFORMER, seed=10 + number)
        graph = both_models(model=MODEL)
        for loader, key in (("model", "model_name"), (STOCK, "unet_name")):
            graph[loader]["inputs"][key] = name
        add_both(graph, "run", seed=seed)
        for stock in [each for each in graph if STOCK in each and number == 2]:
            del graph[stock]
        results.append(latent_of(server, succeed(server, graph), SAVED))
    assert relative_error(results[0], results[1]) > 10 * LIMIT
    copy = "copy_under_model.safetensors"
    write_transformer(server.base / MODELS / copy, TINY_TRANSFORMER, seed=12)
    graph = both_models()
    for loader, key in (("model", "model_name"), (STOCK, "unet_name")):
        graph[loader]["inputs"][key] = copy
    add_both(graph, "run", seed=seed)
    native = latent_of(server, succeed(server, graph), f"run {STOCK} saved")
    assert relative_error(results[1], native) <= LIMIT


def test_two_prompts_that_share_a_model_both_get_their_own(server: ComfyServer, seed: int) -> None:
    alone = [
        latent_of(server, succeed(server, own(seed=seed + index, steps=4)), SAVED)
        for index in range(2)
    ]
    runs = [
        BackgroundRun(server, own(seed=seed + index, steps=4, cfg=5.0000001)) for index in range(2)
    ]
    for run, expected in zip(runs, alone, strict=True):
        result = run.result()
        assert result.status == "success", result.error
        assert torch.allclose(latent_of(server, result, SAVED), expected, atol=1e-5)


def beside(graph: Graph, name: str, *, mesh: str = "", **options: Any) -> None:
    """Add a sampler of the pack that samples as the KSampler does, but for options, maybe on another mesh."""
    inputs = {**graph[SAMPLER]["inputs"], "model": ["model", 0], "shift": 8.0, **options}
    if mesh:
        devices = f"cpu:{mesh_degrees(mesh).world_size}"
        other = {**graph["model"]["inputs"], "mesh": mesh, "devices": devices}
        graph[f"{name} model"] = {**graph["model"], "inputs": other}
        inputs["model"] = [f"{name} model", 0]
    graph[name] = {"class_type": "WanDistSampler", "inputs": inputs}
    graph[f"{name} saved"] = graphs.save_latent(name)


@pytest.mark.parametrize(("cfg", "mesh"), [(1.0, ""), (5.0, ""), (5.0, "tp2")])
def test_a_stock_sampler_holds_up_no_other_job_of_the_pack(
    server: ComfyServer, seed: int, cfg: float, mesh: str
) -> None:
    """It holds up the event loop of ComfyUI's nodes. Which node ComfyUI begins with is its own choice.

    mesh: of another group on the same devices, so that the two take turns.
    """
    graph = own(steps=3, seed=seed, cfg=cfg)
    beside(graph, "a", seed=seed + 1)
    beside(graph, "b", mesh=mesh)
    result = succeed(server, graph)
    assert torch.allclose(
        latent_of(server, result, "b saved"), latent_of(server, result, SAVED), atol=1e-4
    )


def test_one_interrupt_ends_a_stock_sampler_and_the_job_beside_it(
    server: ComfyServer, seed: int
) -> None:
    graph = own(steps=300, seed=seed)
    beside(graph, "a", seed=seed + 1)
    run = BackgroundRun(server, graph)
    run.wait_for_steps(3, maximum=300, node=SAMPLER)
    asked = time.monotonic()
    server.interrupt()
    assert run.result().status == "interrupted"
    assert time.monotonic() - asked < 10
    succeed(server, own(seed=seed))
