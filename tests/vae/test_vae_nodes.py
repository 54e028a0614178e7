"""The nodes of the VAE refuse a file that is no Wan2.2 VAE before they look for a group.

ComfyUI is imported only by a child process: this file run as a script, which prints how the nodes ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from comfyui_child import found_beside_comfyui
from safetensors.torch import save_file

from comfy_wan_dist.mesh.vae_shape import VAEConfig
from devtools.checkpoints import (
    TINY_TRANSFORMER,
    TINY_VAE,
    vae_weights,
    write_transformer,
    write_vae,
)

MODEL, GOOD = "model.safetensors", "good.safetensors"
REFUSED = {
    "wan21.safetensors": "wan21.safetensors is a Wan2.1 VAE (16 latent channels), but Wan2.2 TI2V-5B needs 48; choose "
    "the Wan2.2 VAE, such as wan2.2_vae.safetensors; for A14B and Wan2.1 take ComfyUI's own VAELoader and VAEDecode",
    "wide.safetensors": "wide.safetensors is a VAE of 16 latent channels, but Wan2.2 TI2V-5B needs 48; choose the "
    "Wan2.2 VAE, such as wan2.2_vae.safetensors",
    "quantised.safetensors": "quantised.safetensors stores 'conv2.bias' as F8_E4M3; a VAE may have F32, F16, BF16, "
    "F64, so choose the Wan2.2 VAE, such as wan2.2_vae.safetensors",
}
REACHED = "a group was looked for"


def write_files(folder: Path) -> None:
    write_transformer(folder / MODEL, TINY_TRANSFORMER, seed=1)
    write_vae(folder / GOOD, TINY_VAE, seed=2)
    write_vae(
        folder / "wide.safetensors", VAEConfig(z_dim=16, encoder_dim=8, decoder_dim=8), seed=2
    )
    wan21 = {"decoder.upsamples.0.residual.2.weight": torch.zeros(4, 4, 3, 3, 3)}
    save_file(wan21, folder / "wan21.safetensors")
    weights = vae_weights(TINY_VAE, seed=2)
    weights["conv2.bias"] = weights["conv2.bias"].to(torch.float8_e4m3fn)
    save_file(weights, folder / "quantised.safetensors")


def test_wrong_vae_is_refused_by_the_node_and_no_group_is_looked_for(
    comfyui_path: Path, tmp_path: Path
) -> None:
    write_files(tmp_path)
    ends = found_beside_comfyui(__file__, tmp_path, comfyui_path)
    expected = {name: f"ModelFileError: {message}" for name, message in REFUSED.items()}
    # The good one shows that the registry is where a group would be looked for.
    expected[GOOD] = f"LookupError: {REACHED}"
    assert ends == {node: expected for node in ("decode", "encode")}


def run_nodes(folder: Path) -> dict[str, dict[str, str]]:
    """How the nodes end with each VAE in `folder`, where the registry of groups is out of reach."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import folder_paths

    from comfy_wan_dist.jobs import session
    from comfy_wan_dist.jobs.handle import ModelHandle
    from comfy_wan_dist.nodes.image_to_video_latent import ImageToVideoLatent
    from comfy_wan_dist.nodes.vae_decode import VAEDecode

    folder_paths.add_model_folder_path("vae", str(folder))
    model = ModelHandle(
        path=str(folder / MODEL), dtype="auto", mesh="single", devices="cpu", compile=False
    )

    def decode(vae_name: str) -> Any:
        latent = {"samples": torch.zeros(1, 48, 1, 2, 2)}
        return VAEDecode.execute(model, vae_name, latent, "auto")

    def encode(vae_name: str) -> Any:
        image = torch.zeros(1, 32, 32, 3)
        return ImageToVideoLatent.execute(model, vae_name, 32, 32, 1, 1, "auto", start_image=image)

    def ends(run: Any) -> Iterator[tuple[str, str]]:
        for name in (*REFUSED, GOOD):
            try:
                asyncio.run(run(name))
            except Exception as error:
                yield name, f"{type(error).__name__}: {error}"

    with mock.patch.object(session, "default_groups", side_effect=LookupError(REACHED)):
        return {run.__name__: dict(ends(run)) for run in (decode, encode)}


if __name__ == "__main__":
    print(json.dumps(run_nodes(Path(sys.argv[1]))))
