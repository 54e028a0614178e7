"""Graphs with stock samplers on two MODELs that differ in their loaders only: the native one and the pack's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphs import MODEL, MODELS, Graph, image_to_video, node, save_latent

from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import write_transformer
from devtools.mesh_runs import mesh_degrees

OWN, STOCK = "own", "stock"
T2V_SHAPE = WanShape(dim=256, ffn_dim=512, num_layers=2, in_dim=16, out_dim=16)
I2V_SHAPE = replace(T2V_SHAPE, in_dim=36)
# The experts for high and for low noise.
T2V_FILES = ("model_t2v.safetensors", "model_low_noise.safetensors")
I2V_FILES = ("model_i2v.safetensors", "model_i2v_low_noise.safetensors")


def write_models(base: Path) -> None:
    """Put tiny models of 16 channels where a ComfyUI with this base looks for them."""
    shapes = {name: T2V_SHAPE for name in T2V_FILES} | {name: I2V_SHAPE for name in I2V_FILES}
    for seed, (name, shape) in enumerate(shapes.items()):
        if not (base / MODELS / name).exists():
            write_transformer(base / MODELS / name, shape, seed=seed)


def both_models(*, mesh: str = "cfg2-ulysses2", model: str = MODEL, **options: Any) -> Graph:
    """The native MODEL ("stock") and ours ("own"), two prompts, a latent with a first frame."""
    devices = f"cpu:{mesh_degrees(mesh).world_size}"
    graph = image_to_video(mesh=mesh, devices=devices, model=model, **options)
    for name in ("sampler", "decode", "preview"):
        del graph[name]
    graph[STOCK] = node("UNETLoader", unet_name=model, weight_dtype="default")
    graph[OWN] = node("WanDistModel", model=["model", 0])
    if model != MODEL:
        del graph["latent"]
        del graph["image"]
        size = {"width": 96, "height": 64, "length": 9, "batch_size": 1}
        graph["latent"] = node("EmptyHunyuanLatentVideo", **size)
    return graph


def repeated(graph: Graph, batch: int) -> Graph:
    """The graph with a batch of latents."""
    graph["one latent"] = graph["latent"]
    graph["latent"] = node("RepeatLatentBatch", samples=["one latent", 0], amount=batch)
    return graph


def behind(graph: Graph, kind: str, **inputs: Any) -> None:
    """Put a node that changes a MODEL behind both."""
    for name in (OWN, STOCK):
        inner = f"{name} before {kind} {len(graph)}"
        graph[inner] = graph[name]
        graph[name] = node(kind, model=[inner, 0], **inputs)


def add_both(graph: Graph, name: str, kind: str = "KSampler", **inputs: Any) -> None:
    """A sampler behind each model, and what saves its results."""
    seed = "noise_seed" if kind == "KSamplerAdvanced" else "seed"
    inputs = {
        seed: 5,
        "steps": 3,
        "cfg": 5.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        "latent_image": ["latent", 0],
        **({} if kind == "KSamplerAdvanced" else {"denoise": 1.0}),
        **inputs,
    }
    for model in (OWN, STOCK):
        own = {
            key: [value[0].format(model), value[1]] if isinstance(value, list) else value
            for key, value in inputs.items()
        }
        graph[f"{name} {model}"] = node(kind, model=[model, 0], **own)
        graph[f"{name} {model} saved"] = save_latent(f"{name} {model}")


def count_calls(graph: Graph) -> Graph:
    """The graph with each call of a model that one of its samplers makes in the server's log, by the sampler's name."""
    for name, each in list(graph.items()):
        if each["class_type"].startswith(("KSampler", "SamplerCustom")):
            graph[f"{name} counted"] = node("CountCalls", model=each["inputs"]["model"], name=name)
            each["inputs"]["model"] = [f"{name} counted", 0]
    return graph


def calls_in(log: str) -> dict[str, tuple[int, str]]:
    """By the name of each sampler of `count_calls`: its calls of the model, and what the pack says of its forwards.

    The latter is empty for the native MODEL.
    """
    found: dict[str, tuple[int, str]] = {}
    name = ""
    for called, answered in re.findall(
        r"a call of (.*)|\[wan-dist\] a sampler's forwards: (.*);", log
    ):
        name = called or name
        count, said = found.get(name, (0, ""))
        found[name] = (count + bool(called), said + answered)
    return found
