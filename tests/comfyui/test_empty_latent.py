"""A LATENT made for another model, as the sampler takes it and gives it back: what the stock KSampler of the same
ComfyUI does, whichever that is.

Run as a script beside ComfyUI, it fits latents as one that knows of their stride would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import graphs
import pytest
import torch
from comfy_kit import latent_of, succeed
from comfyui_child import found_beside_comfyui
from graphs import MODEL, Graph, node, sampled_latent
from torch import Tensor

from comfy_wan_dist.mesh.shape import TI2V_5B
from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import relative_error

LIMIT = 1e-3
SIZE = {"width": 128, "height": 64, "batch_size": 2}
EMPTY = {
    "image": node("EmptyLatentImage", **SIZE),
    "16 channels": node("EmptyHunyuanLatentVideo", length=5, **SIZE),
    "128 channels, stride 32": node("EmptyLTXVLatentVideo", length=9, **SIZE | {"width": 256}),
    "16 channels, one frame": node("EmptySD3LatentImage", **SIZE),
}


def with_stock_twin(latent: dict[str, Any], **options: Any) -> Graph:
    graph = sampled_latent(mesh="single", devices="cpu", steps=2, has_image=False, **options)
    graph["latent"] = latent
    inputs = dict(graph["sampler"]["inputs"])
    graph["stock model"] = node("UNETLoader", unet_name=MODEL, weight_dtype="default")
    graph["shifted"] = node("ModelSamplingSD3", model=["stock model", 0], shift=inputs.pop("shift"))
    graph["stock"] = node("KSampler", **inputs | {"model": ["shifted", 0]})
    graph["save stock"] = graphs.save_latent("stock")
    for name in ("sampler", "stock"):
        graph[f"text {name}"] = node("PreviewAny", source=[name, 0])
    return graph


@pytest.mark.parametrize("denoise", [1.0, 0.0])
@pytest.mark.parametrize("latent", EMPTY)
def test_empty_latent_of_another_model_is_sampled_as_stock_does(
    comfy: ComfyServer, seed: int, latent: str, denoise: float
) -> None:
    graphs.write_files(comfy.base)
    result = succeed(comfy, with_stock_twin(EMPTY[latent], seed=seed, denoise=denoise))
    own, stock = latent_of(comfy, result), latent_of(comfy, result, "save stock")
    assert own.shape == stock.shape
    assert own.shape[1] == 48
    assert relative_error(own, stock) <= LIMIT if denoise else torch.equal(own, stock)
    own_keys, stock_keys = (
        [word for word in ("'samples'", "'downscale_ratio") if word in text]
        for name in ("sampler", "stock")
        for text in result.outputs[f"text {name}"]["text"]
    )
    assert own_keys == stock_keys


def later_fit(
    model: Any,
    latent_image: Tensor,
    downscale_ratio_spacial: int | None = None,
    downscale_ratio_temporal: int | None = None,
) -> Tensor:
    """Takes what ComfyUI 0.28 takes; what it was given and which model's format it saw are the values it returns."""
    channels = model.get_model_object("latent_format").latent_channels
    value = (downscale_ratio_spacial or 0) + 100 * (downscale_ratio_temporal or 0)
    return torch.full((1, channels, 1, 2, 2), float(value))


def fit_some() -> dict[str, Any]:
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.sample

    from comfy_wan_dist.comfyui.latent import fit_latent

    latent = {
        "samples": torch.zeros(1, 16, 1, 2, 2),
        "downscale_ratio_spacial": 8,
        "batch_index": [3],
    }
    with mock.patch.object(comfy.sample, "fix_empty_latent_channels", later_fit):
        found = [
            fit_latent(given, TI2V_5B)
            for given in (latent, latent | {"downscale_ratio_temporal": 4})
        ]
    return {
        "fitted": [[*one["samples"].shape[:2], float(one["samples"].max())] for one in found],
        "keys": sorted(found[1]),
        "untouched": sorted(latent),
        "no tensor": fit_latent({"samples": "words"}, TI2V_5B),
        "no room": list(
            fit_latent({"samples": torch.zeros(1, 48, 1, 0, 6)}, TI2V_5B)["samples"].shape
        ),
    }


def test_strides_that_comfyui_knows_reach_it_and_leave_the_latent(
    comfyui_path: Path, tmp_path: Path
) -> None:
    found = found_beside_comfyui(__file__, tmp_path, comfyui_path)
    assert found == {
        "fitted": [[1, 48, 8.0], [1, 48, 408.0]],
        "keys": ["batch_index", "samples"],
        "untouched": ["batch_index", "downscale_ratio_spacial", "samples"],
        "no tensor": {"samples": "words"},
        "no room": [1, 48, 1, 0, 6],
    }


if __name__ == "__main__":
    print(json.dumps(fit_some()))
