"""ComfyUI's own samplers on a MODEL whose forwards run in a group, against the same samplers on the native MODEL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import graphs
import pytest
from comfy_kit import latent_of, succeed
from graphs import MODEL, MODELS, Graph, image_to_video, node, save_latent

from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import write_transformer
from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import relative_error

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

T2V = WanShape(dim=256, ffn_dim=512, num_layers=2, in_dim=16, out_dim=16)
SHAPES = {"model_t2v.safetensors": T2V, "model_i2v.safetensors": replace(T2V, in_dim=36)}
LIMIT = 1e-4
SAMPLERS = (
    *("euler", "euler_ancestral", "heun", "dpm_2", "lms", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_sde"),
    *("ddpm", "lcm", "uni_pc", "res_multistep", "er_sde", "deis"),
)


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    for seed, (name, shape) in enumerate(SHAPES.items()):
        if not (comfy.base / MODELS / name).exists():
            write_transformer(comfy.base / MODELS / name, shape, seed=seed)
    return comfy


def both_models(**options: Any) -> Graph:
    """The native MODEL ("stock") and ours ("own"), two prompts, a latent."""
    graph = image_to_video(**options)
    for name in ("sampler", "decode", "preview"):
        del graph[name]
    stock = node("UNETLoader", unet_name=options.get("model", MODEL), weight_dtype="default")
    return {**graph, "stock": stock, "own": node("WanDistModel", model=["model", 0])}


def add_both(graph: Graph, name: str, **inputs: Any) -> None:
    """A KSampler behind each model, and what saves its results."""
    inputs = {
        "seed": 5,
        "steps": 3,
        "cfg": 5.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        "latent_image": ["latent", 0],
        **inputs,
    }
    for model in ("stock", "own"):
        graph[f"{name} {model}"] = node("KSampler", model=[model, 0], **inputs)
        graph[f"{name} {model} saved"] = save_latent(f"{name} {model}")


@pytest.mark.parametrize("mesh", ["cfg2-ulysses2", "tp2"])
def test_stock_samplers_give_what_they_give_on_the_native_model(
    server: ComfyServer, mesh: str
) -> None:
    ranks = 4 if mesh == "cfg2-ulysses2" else 2
    graph = both_models(mesh=mesh, devices=f"cpu:{ranks}")
    for sampler in SAMPLERS:
        add_both(graph, sampler, sampler_name=sampler)
    run = succeed(server, graph)
    for sampler in SAMPLERS:
        own, stock = (
            latent_of(server, run, f"{sampler} {model} saved") for model in ("own", "stock")
        )
        print(sampler, relative_error(own, stock))
    for sampler in SAMPLERS:
        own, stock = (
            latent_of(server, run, f"{sampler} {model} saved") for model in ("own", "stock")
        )
        assert relative_error(own, stock) <= LIMIT, sampler
