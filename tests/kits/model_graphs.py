"""Graphs with stock samplers on two MODELs that differ in their loaders only: the native one and the pack's."""

from __future__ import annotations

from typing import Any

from graphs import MODEL, Graph, image_to_video, node, save_latent

from devtools.mesh_runs import mesh_degrees

OWN, STOCK = "own", "stock"


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
