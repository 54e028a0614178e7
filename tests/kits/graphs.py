"""API-format graphs of this pack, and the small files they name."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from comfy_wan_dist.model_file import conditioning as conditioning_file
from devtools.checkpoints import TINY_TRANSFORMER, TINY_VAE, write_transformer, write_vae

MODELS, VAES, LORAS = "models/diffusion_models", "models/vae", "models/loras"
MODEL, VAE, IMAGE = "tiny_wan.safetensors", "tiny_vae.safetensors", "start.png"
POSITIVE, NEGATIVE = "positive.safetensors", "negative.safetensors"

Graph = dict[str, dict[str, Any]]


def write_files(base: Path) -> None:
    """Put a tiny transformer, VAE, two prompts and a start image where a ComfyUI with this base looks for them.

    Files that are there stay as they are, so that a group need not load them again.
    """
    for folder in (MODELS, VAES, LORAS, "input"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    if (base / MODELS / MODEL).exists():
        return
    write_vae(base / VAES / VAE, TINY_VAE, seed=2)
    generator = torch.Generator().manual_seed(3)
    for name in (POSITIVE, NEGATIVE):
        conditioning_file.save(base / "input" / name, torch.randn(1, 24, 4096, generator=generator))
    pixels = torch.randint(0, 255, (48, 80, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(base / "input" / IMAGE)
    write_transformer(base / MODELS / MODEL, TINY_TRANSFORMER, seed=1)


def write_hollow_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "BF16"
) -> None:
    """A whole safetensors file of zeros that take no room on the disk, however large its tensors are."""
    item_bytes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I8": 1}[dtype]
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * item_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(file.tell() + end)


def image_to_video(
    *,
    model: str = MODEL,
    dtype: str = "float32",
    mesh: str = "cfg2-ulysses2",
    devices: str = "cpu:4",
    seed: int = 7,
    steps: int = 3,
    cfg: float = 5.0,
    sampler: str = "uni_pc",
    scheduler: str = "simple",
    shift: float = 8.0,
    denoise: float = 1.0,
    width: int = 96,
    height: int = 64,
    length: int = 9,
    batch_size: int = 1,
    has_image: bool = True,
) -> Graph:
    """Loader, start image, sampler, decoder, preview. Node ids are the words used here."""
    graph: Graph = {
        "model": node(
            "WanDistLoadModel",
            model_name=model,
            dtype=dtype,
            mesh=mesh,
            devices=devices,
            compile=False,
        ),
        "positive": node("WanDistLoadConditioning", file=f"{POSITIVE} [input]"),
        "negative": node("WanDistLoadConditioning", file=f"{NEGATIVE} [input]"),
        "latent": node(
            "WanDistImageToVideoLatent",
            model=["model", 0],
            vae_name=VAE,
            width=width,
            height=height,
            length=length,
            batch_size=batch_size,
            vae_dtype="float32",
        ),
        "sampler": node(
            "WanDistSampler",
            model=["model", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler_name=sampler,
            scheduler=scheduler,
            shift=shift,
            denoise=denoise,
        ),
        "decode": node(
            "WanDistVAEDecode",
            model=["model", 0],
            vae_name=VAE,
            samples=["sampler", 0],
            vae_dtype="float32",
        ),
        "preview": node("PreviewImage", images=["decode", 0]),
    }
    if has_image:
        graph["image"] = node("LoadImage", image=IMAGE)
        graph["latent"]["inputs"]["start_image"] = ["image", 0]
    return graph


def sampled_latent(**options: Any) -> Graph:
    """`image_to_video` that saves the sampled latent (node "save") and decodes nothing."""
    graph = image_to_video(**options)
    del graph["decode"], graph["preview"]
    graph["save"] = save_latent("sampler")
    return graph


def start_latent(**options: Any) -> Graph:
    """`image_to_video` up to the start latent: it is saved ("save") and printed ("text")."""
    graph = image_to_video(**options)
    for name in ("positive", "negative", "sampler", "decode", "preview"):
        del graph[name]
    graph["save"] = save_latent("latent")
    graph["text"] = node("PreviewAny", source=["latent", 0])
    return graph


def save_latent(source: str) -> dict[str, Any]:
    return node("SaveLatent", samples=[source, 0], filename_prefix="latents/test")


def save_tensors(graph: Graph, *, latent: Sequence[str] = (), images: Sequence[str] = ()) -> Graph:
    """Let the outputs of these nodes be saved in full, for `comfy_kit.tensors_of`."""
    for kind, names in (("latent", latent), ("images", images)):
        for name in names:
            graph[f"tensors {name}"] = node("SaveTensors", **{kind: [name, 0]})
    return graph


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}
