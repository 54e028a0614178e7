"""The graphs of Wan2.2 that ComfyUI offers among its templates, in API form, by nodes of ComfyUI alone.

As published: nodes, links, steps, guidance, samplers, shifts. Other than published: the files and the sizes, prompts
from files, and VAEs of small widths. A14B has two forms, with LoRAs for 4 steps and without LoRAs.
Source: comfyui-workflow-templates 0.7.25, `video_wan2_2_5B_ti2v`, `video_wan2_2_14B_t2v`, `..._i2v`, `..._flf2v`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphs import IMAGE, MODEL, NEGATIVE, POSITIVE, VAE, Graph, node

from devtools.mesh_runs import mesh_degrees

SIZE = {"width": 96, "height": 64, "length": 9, "batch_size": 1}
LAST = "sampler"
"""The node whose latent is decoded."""
VIDEO = "save video"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expert:
    """A file of A14B, and that of its LoRA."""

    model: str
    lora: str


def ti2v_5b(*, seed: int, has_image: bool) -> Graph:
    graph = _prompts() | {
        "vae": node("SmallVAELoader", vae_name=VAE),
        "loader": node("UNETLoader", unet_name=MODEL, weight_dtype="default"),
        "shift": node("ModelSamplingSD3", model=["loader", 0], shift=8.0),
        "latent": node("Wan22ImageToVideoLatent", vae=["vae", 0], **SIZE),
        LAST: node(
            "KSampler",
            model=["shift", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            seed=seed,
            steps=20,
            cfg=5.0,
            sampler_name="uni_pc",
            scheduler="simple",
            denoise=1.0,
        ),
    }
    if has_image:
        graph["image"] = node("LoadImage", image=IMAGE)
        graph["latent"]["inputs"]["start_image"] = ["image", 0]
    return graph | _video(fps=24)


def t2v_a14b(high: Expert, low: Expert, *, seed: int, has_loras: bool) -> Graph:
    graph = _prompts() | {
        "vae": node("RandomVAE"),
        "latent": node("EmptyHunyuanLatentVideo", **SIZE),
    }
    stages = _stages(high, low, seed=seed, has_loras=has_loras, shift=5.0 if has_loras else 8.0)
    for stage in ("first", LAST):
        stages[stage]["inputs"] |= {"positive": ["positive", 0], "negative": ["negative", 0]}
    stages["first"]["inputs"]["latent_image"] = ["latent", 0]
    return graph | stages | _video(fps=16)


def i2v_a14b(
    high: Expert, low: Expert, *, seed: int, has_loras: bool, has_end_image: bool = False
) -> Graph:
    """With an end image it is the template for first and last frame."""
    graph = _prompts() | {
        "vae": node("RandomVAE"),
        "image": node("LoadImage", image=IMAGE),
        "start": node(
            "WanImageToVideo",
            positive=["positive", 0],
            negative=["negative", 0],
            vae=["vae", 0],
            start_image=["image", 0],
            **SIZE,
        ),
    }
    shift = 5.0 if has_loras else 8.0
    if has_end_image:
        graph["end image"] = node("ImageInvert", image=["image", 0])
        graph["start"]["class_type"] = "WanFirstLastFrameToVideo"
        graph["start"]["inputs"]["end_image"] = ["end image", 0]
    stages = _stages(high, low, seed=seed, has_loras=has_loras, shift=shift)
    for stage in ("first", LAST):
        stages[stage]["inputs"] |= {"positive": ["start", 0], "negative": ["start", 1]}
        if has_end_image and not has_loras:
            stages[stage]["inputs"]["cfg"] = 4.0
    stages["first"]["inputs"]["latent_image"] = ["start", 2]
    return graph | stages | _video(fps=16)


def with_own_loaders(graph: Graph, mesh: str) -> Graph:
    """The graph with the pack's MODEL in the place of each that UNETLoader gives."""
    swapped = dict(graph)
    for name, each in graph.items():
        if each["class_type"] == "UNETLoader":
            swapped[f"{name} own"] = node(
                "WanDistLoadModel",
                model_name=each["inputs"]["unet_name"],
                dtype="float32",
                mesh=mesh,
                devices=f"cpu:{mesh_degrees(mesh).world_size}",
                compile=False,
            )
            swapped[name] = node("WanDistModel", model=[f"{name} own", 0])
    return swapped


def _prompts() -> Graph:
    return {
        name: node("WanDistLoadConditioning", file=f"{file} [input]")
        for name, file in (("positive", POSITIVE), ("negative", NEGATIVE))
    }


def _stages(high: Expert, low: Expert, *, seed: int, has_loras: bool, shift: float) -> Graph:
    """Two samplers, of which the second goes on with the noise that the first leaves."""
    steps, cfg = (4, 1.0) if has_loras else (20, 3.5)
    half = steps // 2
    common: dict[str, Any] = dict(steps=steps, cfg=cfg, sampler_name="euler", scheduler="simple")
    graph = {
        "first": node(
            "KSamplerAdvanced",
            model=["high shift", 0],
            add_noise="enable",
            noise_seed=seed,
            start_at_step=0,
            end_at_step=half,
            return_with_leftover_noise="enable",
            **common,
        ),
        LAST: node(
            "KSamplerAdvanced",
            model=["low shift", 0],
            latent_image=["first", 0],
            add_noise="disable",
            noise_seed=0,
            start_at_step=half,
            end_at_step=steps if has_loras else 10000,
            return_with_leftover_noise="disable",
            **common,
        ),
    }
    for name, expert in (("high", high), ("low", low)):
        graph[name] = node("UNETLoader", unet_name=expert.model, weight_dtype="default")
        model = name
        if has_loras:
            model = f"{name} LoRA"
            graph[model] = node(
                "LoraLoaderModelOnly",
                model=[name, 0],
                lora_name=expert.lora,
                strength_model=1.0000000000000002,
            )
        graph[f"{name} shift"] = node("ModelSamplingSD3", model=[model, 0], shift=shift)
    return graph


def _video(*, fps: int) -> Graph:
    return {
        "decode": node("VAEDecode", samples=[LAST, 0], vae=["vae", 0]),
        "video": node("CreateVideo", images=["decode", 0], fps=fps),
        VIDEO: node(
            "SaveVideo",
            video=["video", 0],
            filename_prefix="video/ComfyUI",
            format="auto",
            codec="auto",
        ),
    }
