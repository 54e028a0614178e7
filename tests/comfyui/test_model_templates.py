"""The templates that ComfyUI has for Wan2.2, with its own loader and with the pack's, in one server."""

from __future__ import annotations

from collections.abc import Callable

import av
import graphs
import pytest
from comfy_kit import latent_of, succeed, tensors_of
from graphs import LORAS, Graph, save_latent, save_tensors
from model_graphs import I2V_FILES, T2V_FILES, T2V_SHAPE, write_models
from safetensors.torch import save_file
from template_graphs import LAST, SIZE, VIDEO, Expert, i2v_a14b, t2v_a14b, ti2v_5b, with_own_loaders

from comfy_wan_dist.mesh.parameters import expected_parameters
from devtools.comfy_server import ComfyServer
from devtools.loras import plain_lora, spelled
from devtools.mesh_runs import relative_error

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

LIMIT = 1e-4
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
    stock = TEMPLATES[template](seed)
    stock["save"] = save_latent(LAST)
    save_tensors(stock, images=["decode"])
    own = with_own_loaders(stock, "cfg2-ulysses2")
    log = len(server.log)
    results = [succeed(server, graph) for graph in (stock, own)]
    samplers = [each for each in own.values() if each["class_type"].startswith("KSampler")]
    assert server.log[log:].count("a sampler's forwards: ") == len(samplers)
    theirs, ours = (latent_of(server, result) for result in results)
    assert relative_error(ours, theirs) <= LIMIT
    theirs, ours = (tensors_of(server, result, "decode")["images"] for result in results)
    assert relative_error(ours, theirs) <= LIMIT
    for result in results:
        (file,) = result.outputs[VIDEO]["images"]
        with av.open(server.base / file["type"] / file["subfolder"] / file["filename"]) as video:
            assert sum(1 for _ in video.decode(video=0)) == SIZE["length"]
