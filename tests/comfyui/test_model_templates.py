"""The templates that ComfyUI has for Wan2.2, with its own loader and with the pack's, in one server."""

from __future__ import annotations

from collections.abc import Callable

import av
import graphs
import pytest
from comfy_kit import latent_of, succeed, tensors_of
from graphs import LORAS, Graph, node, save_latent, save_tensors
from model_graphs import I2V_FILES, T2V_FILES, T2V_SHAPE, write_models
from safetensors.torch import save_file
from template_graphs import LAST, SIZE, VIDEO, Expert, i2v_a14b, t2v_a14b, ti2v_5b, with_own_loaders

from comfy_wan_dist.mesh.parameters import expected_parameters
from devtools.comfy_server import ComfyServer, PromptResult
from devtools.loras import plain_lora, spelled
from devtools.mesh_runs import relative_error

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

LIMIT = 1e-4
MESH = "cfg2-ulysses2"
LORA_FILES = ("template_high.safetensors", "template_low.safetensors")
T2V, I2V = (
    [Expert(model=model, lora=lora) for model, lora in zip(files, LORA_FILES, strict=True)]
    for files in (T2V_FILES, I2V_FILES)
)


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    write_models(comfy.base)
    for seed, name in enumerate(LORA_FILES):
        parts = plain_lora(expected_parameters(T2V_SHAPE), seed=seed)
        save_file(spelled(parts, "comfyui"), comfy.base / LORAS / name)
    return comfy


TEMPLATES: dict[str, Callable[[int], Graph]] = {
    "TI2V-5B, text": lambda seed: ti2v_5b(seed=seed, has_image=False),
    "TI2V-5B, image": lambda seed: ti2v_5b(seed=seed, has_image=True),
    "A14B, text": lambda seed: t2v_a14b(*T2V, seed=seed, has_loras=False),
    "A14B, text, LoRAs": lambda seed: t2v_a14b(*T2V, seed=seed, has_loras=True),
    "A14B, image": lambda seed: i2v_a14b(*I2V, seed=seed, has_loras=False),
    "A14B, image, LoRAs": lambda seed: i2v_a14b(*I2V, seed=seed, has_loras=True),
    "A14B, first and last frame": lambda seed: i2v_a14b(
        *I2V, seed=seed, has_loras=False, has_end_image=True
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_run_with_no_more_than_the_loaders_swapped(
    server: ComfyServer, template: str, seed: int
) -> None:
    stock = with_saved(TEMPLATES[template](seed))
    own = with_own_loaders(stock, MESH)
    samplers = [each for each in own.values() if each["class_type"].startswith("KSampler")]
    log = len(server.log)
    results = [succeed(server, graph) for graph in (stock, own)]
    assert server.log[log:].count("a sampler's forwards: ") == len(samplers)
    assert_equal(server, *results)
    for result in results:
        (file,) = result.outputs[VIDEO]["images"]
        with av.open(server.base / file["type"] / file["subfolder"] / file["filename"]) as video:
            assert sum(1 for _ in video.decode(video=0)) == SIZE["length"]


def test_one_loader_has_both_experts_of_a_template(server: ComfyServer, seed: int) -> None:
    stock = with_saved(t2v_a14b(*T2V, seed=seed, has_loras=False))
    own = with_own_loaders(stock, MESH)
    loader = own["high own"]
    loader["inputs"]["low_noise_model"] = own.pop("low own")["inputs"]["model_name"]
    own["low"] = node("WanDistModel", model=["high own", 0], expert="low noise")
    assert_equal(server, *(succeed(server, graph) for graph in (stock, own)))


def with_saved(graph: Graph) -> Graph:
    """The graph with what `assert_equal` compares."""
    graph["save"] = save_latent(LAST)
    return save_tensors(graph, images=["decode"])


def assert_equal(server: ComfyServer, stock: PromptResult, own: PromptResult) -> None:
    """The latent, and the images that it becomes."""
    theirs, ours = (latent_of(server, result) for result in (stock, own))
    assert relative_error(ours, theirs) <= LIMIT
    theirs, ours = (tensors_of(server, result, "decode")["images"] for result in (stock, own))
    assert relative_error(ours, theirs) <= LIMIT
