"""API-format graphs of this pack, and the small files they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from comfy_wan_dist import conditioning_file
from devtools.checkpoints import TINY_TRANSFORMER, TINY_VAE, write_transformer, write_vae

MODEL, VAE, IMAGE = "tiny_wan.safetensors", "tiny_vae.safetensors", "start.png"
POSITIVE, NEGATIVE = "positive.safetensors", "negative.safetensors"

Graph = dict[str, dict[str, Any]]


def write_files(base: Path) -> None:
    """Put a tiny transformer, VAE, two prompts and a start image where a ComfyUI with this base looks for them."""
    for folder in ("models/diffusion_models", "models/vae", "input"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    write_transformer(base / "models/diffusion_models" / MODEL, TINY_TRANSFORMER, seed=1)
    write_vae(base / "models/vae" / VAE, TINY_VAE, seed=2)
    generator = torch.Generator().manual_seed(3)
    for name in (POSITIVE, NEGATIVE):
        conditioning_file.save(base / "input" / name, torch.randn(1, 24, 4096, generator=generator))
    pixels = torch.randint(0, 255, (48, 80, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(base / "input" / IMAGE)


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
        "model": _node(
            "WanDistLoadModel", model_name=model, dtype=dtype, mesh=mesh, devices=devices, compile=False
        ),
        "positive": _node("WanDistLoadConditioning", file=f"{POSITIVE} [input]"),
        "negative": _node("WanDistLoadConditioning", file=f"{NEGATIVE} [input]"),
        "latent": _node(
            "WanDistImageToVideoLatent",
            model=["model", 0],
            vae_name=VAE,
            width=width,
            height=height,
            length=length,
            batch_size=batch_size,
            vae_dtype="float32",
        ),
        "sampler": _node(
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
        "decode": _node(
            "WanDistVAEDecode",
            model=["model", 0],
            vae_name=VAE,
            samples=["sampler", 0],
            vae_dtype="float32",
        ),
        "preview": _node("PreviewImage", images=["decode", 0]),
    }
    if has_image:
        graph["image"] = _node("LoadImage", image=IMAGE)
        graph["latent"]["inputs"]["start_image"] = ["image", 0]
    return graph


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}
