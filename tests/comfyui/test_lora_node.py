"""WanDistLoRA in a real ComfyUI: against the stock LoraLoaderModelOnly, and what is said of a file's keys.

Covered: every kind of change that ComfyUI makes too, in the spellings that it knows; chains; the spelling that it does
not know; a strength of 0; unknown keys in report and log; a file replaced on disk. Not covered: what is refused
(test_bad_input.py).
"""

from __future__ import annotations

import graphs
import pytest
import torch
from comfy_kit import group_of, latent_of, succeed
from graphs import LORAS, MODEL, MODELS, Graph, node, sampled_latent
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.mesh.parameters import expected_parameters
from devtools.checkpoints import TINY_TRANSFORMER
from devtools.comfy_server import ComfyServer
from devtools.loras import mixed_lora, plain_lora, spelled
from devtools.mesh_runs import relative_error

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

COMFYUI_LIMIT = 1e-3
SHAPES = expected_parameters(TINY_TRANSFORMER)
# ComfyUI takes a modulation's difference for known and then leaves it out: the parameter is no leaf module's.
MIXED = {
    name: tensors
    for name, tensors in mixed_lora(SHAPES, seed=5).items()
    if not name.endswith("modulation")
}
PLAIN = plain_lora(SHAPES, seed=6)
FILES = {
    "mixed.safetensors": spelled(MIXED, "comfyui"),
    "kohya.safetensors": spelled(PLAIN, "kohya"),
    "diffusers.safetensors": spelled(PLAIN, "diffusers"),
    "partly.safetensors": spelled(PLAIN, "comfyui")
    | {
        "lora_te_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(1.0),
        "diffusion_model.blocks.0.cross_attn.k_img.lora_A.weight": torch.zeros(4, 512),
    },
}
Chain = list[tuple[str, float]]


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    for name, tensors in FILES.items():
        save_file(tensors, comfy.base / LORAS / name)
    return comfy


def with_loras(graph: Graph, chain: Chain) -> Graph:
    """The graph with a chain of nodes between loader and sampler; its report is shown by the node "text"."""
    source = "model"
    for index, (name, strength) in enumerate(chain):
        lora = node("WanDistLoRA", model=[source, 0], lora_name=name, strength=strength)
        source = f"lora {index}"
        graph[source] = lora
    graph["sampler"]["inputs"]["model"] = [source, 0]
    graph["text"] = node("PreviewAny", source=["sampler", 1])
    return graph


def own(chain: Chain, seed: int, **options: object) -> Graph:
    return with_loras(sampled_latent(seed=seed, steps=2, sampler="euler", **options), chain)


def with_stock_twin(graph: Graph, chain: Chain) -> Graph:
    """The graph with a KSampler of the same job, which the node "save stock" saves."""
    source = "stock model"
    graph[source] = node("UNETLoader", unet_name=MODEL, weight_dtype="default")
    for index, (name, strength) in enumerate(chain):
        lora = node(
            "LoraLoaderModelOnly", model=[source, 0], lora_name=name, strength_model=strength
        )
        source = f"stock lora {index}"
        graph[source] = lora
    inputs = dict(graph["sampler"]["inputs"])
    graph["stock shift"] = node("ModelSamplingSD3", model=[source, 0], shift=inputs.pop("shift"))
    graph["stock"] = node("KSampler", **inputs | {"model": ["stock shift", 0]})
    graph["save stock"] = graphs.save_latent("stock")
    return graph


def text_of(server: ComfyServer, graph: Graph) -> tuple[Tensor, str]:
    result = succeed(server, graph)
    return latent_of(server, result), result.outputs["text"]["text"][0]


@pytest.mark.parametrize(
    "chain",
    [
        [("mixed.safetensors", 0.8)],
        [("kohya.safetensors", 0.7), ("mixed.safetensors", -1.3), ("kohya.safetensors", 0.2)],
    ],
    ids=["mixed", "three"],
)
def test_chain_is_that_of_the_stock_nodes(server: ComfyServer, seed: int, chain: Chain) -> None:
    result = succeed(server, with_stock_twin(own(chain, seed), chain))
    latent, stock = latent_of(server, result), latent_of(server, result, "save stock")
    assert relative_error(latent, stock) <= COMFYUI_LIMIT
    bare = latent_of(server, succeed(server, own([], seed)))
    assert relative_error(bare, stock) > 10 * COMFYUI_LIMIT


def test_diffusers_spelling_counts_here_and_not_in_the_stock_node(
    server: ComfyServer, seed: int
) -> None:
    chain = [("diffusers.safetensors", 1.0)]
    result = succeed(server, with_stock_twin(own(chain, seed), chain))
    latent, stock = latent_of(server, result), latent_of(server, result, "save stock")
    same = latent_of(server, succeed(server, own([("kohya.safetensors", 1.0)], seed)))
    bare = latent_of(server, succeed(server, own([], seed)))
    assert torch.equal(latent, same)
    assert relative_error(bare, stock) <= COMFYUI_LIMIT
    assert relative_error(bare, latent) > 10 * COMFYUI_LIMIT


def test_report_and_log_say_what_was_changed_and_what_was_left_out(
    server: ComfyServer, seed: int
) -> None:
    log_size = len(server.log)
    _, report = text_of(server, own([("partly.safetensors", 0.5), ("mixed.safetensors", 1)], seed))
    left_out = (
        "2 keys are not this model's and left out: 'diffusion_model.blocks.0.cross_attn.k_img.lora_A.weight', "
        "'lora_te_text_model_encoder_layers_0_mlp_fc1.alpha'"
    )
    first, second = report.splitlines()[0:3:2]
    changed = f"{len(PLAIN)} of {len(SHAPES)} parameters changed"
    assert first == f"LoRA partly.safetensors at strength 0.5: {changed}; {left_out}"
    assert second.startswith("LoRA mixed.safetensors at strength 1: ")
    assert f"[wan-dist] {first}" in server.log[log_size:]


def test_strength_0_is_no_lora_and_a_change_of_strength_reads_little(
    server: ComfyServer, seed: int
) -> None:
    bare, _ = text_of(server, own([], seed))
    group = group_of(server)
    without, report = text_of(server, own([("mixed.safetensors", 0)], seed))
    assert torch.equal(bare, without)
    assert "LoRA" not in report
    _, report = text_of(server, own([("mixed.safetensors", 0.4)], seed))
    size = (server.base / MODELS / MODEL).stat().st_size
    read = int(report.split(" bytes read from disk")[0].split()[-1])
    assert 0 < read < 4 * 0.7 * size
    again, _ = text_of(server, own([], seed + 1))
    assert again.shape == bare.shape
    assert group_of(server) == group


def test_replaced_file_is_merged_anew(server: ComfyServer, seed: int) -> None:
    path = server.base / LORAS / "replaced.safetensors"
    chain = [(path.name, 1.0)]
    latents = []
    for file in ("kohya.safetensors", "diffusers.safetensors", "mixed.safetensors"):
        save_file(load_file(server.base / LORAS / file), path)
        latents.append(text_of(server, own(chain, seed))[0])
    assert torch.equal(latents[0], latents[1])
    assert not torch.equal(latents[1], latents[2])
