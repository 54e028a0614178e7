"""Graphs as people have them: what stock ComfyUI runs gives the same latent here, beside the stock nodes.

Covered: inputs that are linked. What is refused on purpose is listed in docs/differences.md.
"""

from __future__ import annotations

import json

import graphs
import pytest
import torch
from comfy_kit import latent_of, succeed
from graphs import (
    LORAS,
    Graph,
    image_to_video,
    node,
)
from safetensors.torch import save_file

from comfy_wan_dist.mesh.parameters import expected_parameters
from devtools.checkpoints import TINY_TRANSFORMER
from devtools.comfy_server import ComfyServer
from devtools.loras import plain_lora, spelled

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

LORA = "linked.safetensors"
ANY, COMBO = range(2)
"""Outputs of LinkedValue."""


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    lora = spelled(plain_lora(expected_parameters(TINY_TRANSFORMER), seed=6), "comfyui")
    save_file(lora, comfy.base / LORAS / LORA)
    return comfy


# ---- linked inputs


def all_nodes(seed: int) -> Graph:
    """A graph with every node of this pack but that which saves conditioning, whose output is a new file."""
    graph = image_to_video(seed=seed, steps=2, length=5)
    graph["lora"] = node("WanDistLoRA", model=["model", 0], lora_name=LORA, strength=0.5)
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    graph["save"] = graphs.save_latent("sampler")
    size = {"width": 1280, "height": 704, "length": 121, "batch_size": 1}
    graph["plan"] = node("WanDistPlan", **size, steps=20, cfg=5.0, devices="8xH100-SXM")
    return graph


def link_widgets(server: ComfyServer, graph: Graph, *, combos_only: bool) -> Graph:
    """The graph with all widgets of this pack's nodes, given or at their defaults, as links."""
    linked: Graph = dict(graph)
    info = server.get("/object_info")
    for name, each in graph.items():
        if not each["class_type"].startswith("WanDist"):
            continue
        inputs = dict(each["inputs"])
        described = info[each["class_type"]]["input"]
        for key, (kind, options) in {
            **described["required"],
            **described.get("optional", {}),
        }.items():
            value = inputs.get(key, options.get("default"))
            if isinstance(value, list) or value is None or (combos_only and kind != "COMBO"):
                continue
            linked[f"{name} {key}"] = node("LinkedValue", value=json.dumps(value))
            inputs[key] = [f"{name} {key}", COMBO if combos_only else ANY]
        linked[name] = {**each, "inputs": inputs}
    return linked


@pytest.mark.parametrize("combos_only", [False, True], ids=["any type", "COMBO"])
def test_linked_inputs_give_what_constants_give_and_are_cached(
    server: ComfyServer, seed: int, combos_only: bool
) -> None:
    graph = all_nodes(seed)
    expected = latent_of(server, succeed(server, graph))
    linked = link_widgets(server, graph, combos_only=combos_only)
    assert len(linked) > len(graph) + (10 if combos_only else 40)
    assert torch.equal(latent_of(server, succeed(server, linked)), expected)
    # A second time ComfyUI finds every node in its cache.
    (cached,) = succeed(server, linked).of_kind("execution_cached")
    assert set(cached.data["nodes"]) == linked.keys()
