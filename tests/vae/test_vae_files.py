"""VAE files: the forms that are loaded, and what is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, AutoencoderKLWan
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.jobs.handle import resolve_vae
from comfy_wan_dist.mesh.devices import parse_devices
from comfy_wan_dist.mesh.vae_parameters import vae_parameters
from comfy_wan_dist.mesh.vae_shape import VAEConfig
from comfy_wan_dist.model_file.vae import vae_config_of
from comfy_wan_dist.model_file.vae_names import PREFIXES, official_vae_tensors
from devtools.checkpoints import TINY_TRANSFORMER, TINY_VAE, transformer_weights, vae_weights
from devtools.references import build_diffusers_vae
from devtools.vae_runs import load_vae

CPU = torch.device("cpu")
# Other numbers of blocks, on which the names depend.
UNEVEN = VAEConfig(
    encoder_dim=8,
    decoder_dim=8,
    encoder_res_blocks=1,
    decoder_res_blocks=2,
    temporal_levels=(True, False, True),
)
WIDE = VAEConfig(z_dim=16, encoder_dim=8, decoder_dim=8)
SHALLOW = VAEConfig(encoder_dim=8, decoder_dim=8, dim_mult=(1, 1), temporal_levels=(True,))


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    vae, _ = load_vae(str(path), dtype=dtype, device=CPU)
    return dict(vae.named_parameters())


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return vae_weights(TINY_VAE, seed=2)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_official_names_are_loaded_behind_a_prefix(
    tmp_path: Path, weights: dict[str, Tensor], prefix: str, dtype: torch.dtype
) -> None:
    path = tmp_path / "vae.safetensors"
    stored = {name: value.to(dtype) for name, value in weights.items()}
    beside = {"model.diffusion_model.head.modulation": torch.zeros(1)} if prefix else {}
    save_file({prefix + name: value for name, value in stored.items()} | beside, path)
    assert_same(loaded(path), {name: value.float() for name, value in stored.items()})
    assert_same(loaded(path, dtype), stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folder_that_diffusers_wrote_is_loaded(
    tmp_path: Path, weights: dict[str, Tensor], dtype: torch.dtype
) -> None:
    build_diffusers_vae(TINY_VAE, weights).to(dtype).save_pretrained(tmp_path / "vae")
    (path,) = (tmp_path / "vae").glob("*.safetensors")
    assert load_file(path).keys() != weights.keys()
    stored = {name: value.to(dtype) for name, value in weights.items()}
    assert_same(loaded(path, dtype), stored)


def of_diffusers(config: VAEConfig, **options: Any) -> dict[str, Tensor]:
    with init_empty_weights():
        model = AutoencoderKLWan(
            base_dim=config.encoder_dim,
            decoder_base_dim=config.decoder_dim,
            z_dim=config.z_dim,
            num_res_blocks=config.encoder_res_blocks,
            temperal_downsample=list(config.temporal_levels),
            is_residual=True,
            in_channels=12,
            out_channels=12,
            **options,
        )
    return dict(model.state_dict())


@pytest.mark.parametrize("config", [VAEConfig(), UNEVEN], ids=["published", "uneven"])
def test_every_tensor_of_diffusers_own_vae_has_an_official_name(config: VAEConfig) -> None:
    official = official_vae_tensors(of_diffusers(config), label="x")
    shapes = {name: tuple(value.shape) for name, value in official.items()}
    assert shapes == vae_parameters(config)
    assert vae_config_of(shapes, label="file") == config


def wan21_of_diffusers() -> dict[str, Tensor]:
    with init_empty_weights():
        return dict(AutoencoderKLWan(base_dim=8).state_dict())


def image_vae_of_diffusers() -> dict[str, Tensor]:
    with init_empty_weights():
        return dict(AutoencoderKL().state_dict())


def as_zeros(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros(value.shape) for name, value in tensors.items()}


def without(name: str) -> dict[str, Tensor]:
    return {n: v for n, v in vae_weights(TINY_VAE, seed=2).items() if n != name}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: {"decoder.upsamples.0.residual.2.weight": torch.zeros(4, 4, 3, 3, 3)},
            "file.safetensors is a Wan2.1 VAE (16 latent channels), but Wan2.2 TI2V-5B needs 48; choose the Wan2.2 "
            "VAE, such as wan2.2_vae.safetensors; for A14B and Wan2.1 take ComfyUI's own VAELoader and VAEDecode",
        ),
        (wan21_of_diffusers, "file.safetensors is a Wan2.1 VAE (16 latent channels)"),
        (lambda: vae_weights(WIDE, seed=2), "is a VAE of 16 latent channels, but Wan2.2 TI2V-5B"),
        (lambda: of_diffusers(WIDE), "is a VAE of 16 latent channels, but Wan2.2 TI2V-5B"),
        (lambda: vae_weights(SHALLOW, seed=2), "that shrinks by 4 in space and 2 in time"),
        (
            lambda: transformer_weights(TINY_TRANSFORMER, seed=1),
            "file.safetensors is not a Wan2.2 VAE: it is a Wan transformer",
        ),
        (image_vae_of_diffusers, "is not a Wan2.2 VAE: it looks like a VAE"),
        (lambda: {"x": torch.zeros(1)}, "is not a Wan2.2 VAE: its 1 tensors have other names"),
        (lambda: without("decoder.middle.1.proj.weight"), "decoder.middle.1.proj.weight"),
        (
            lambda: without("decoder.upsamples.0.upsamples.0.residual.2.weight"),
            "lacks the tensor decoder.upsamples.0.upsamples.0.residual.2.weight",
        ),
        (lambda: without("") | {"extra": torch.zeros(1)}, "VAE does not have, 'extra';"),
        (
            lambda: (
                of_diffusers(TINY_VAE)
                | {f"decoder.up_blocks.0.resnets.{'9' * 900}.norm1.gamma": torch.zeros(1)}
            ),
            "has 1 tensors that a Wan2.2 VAE does not have, 'decoder.up_blocks.0.resnets.99",
        ),
        (lambda: without("") | {"empty": torch.zeros(0)}, "has 197 tensors, or empty ones"),
        (
            lambda: without("") | {str(i): torch.zeros(1) for i in range(900)},
            "has 1096 tensors, or empty ones",
        ),
        (
            lambda: without("") | {"conv2.weight": torch.zeros(48, 48, 1, 1, 2)},
            "conv2.weight has shape [48, 48, 1, 1, 2]",
        ),
        (
            lambda: without("") | {"conv2.bias": torch.zeros(48).to(torch.float8_e4m3fn)},
            "file.safetensors stores 'conv2.bias' as F8_E4M3; a VAE may have F32, F16, BF16",
        ),
        (
            lambda: of_diffusers(TINY_VAE) | {"conv1.bias": torch.zeros(96)},
            "holds a tensor under two names",
        ),
    ],
)
def test_other_files_are_refused_by_what_they_are(
    tmp_path: Path, make: Callable[[], dict[str, Tensor]], words: str
) -> None:
    path = tmp_path / "file.safetensors"
    tensors = make()
    is_meta = any(value.is_meta for value in tensors.values())
    save_file(as_zeros(tensors) if is_meta else tensors, path)
    with pytest.raises(ModelFileError) as caught:
        loaded(path)
    message = str(caught.value)
    with pytest.raises(ModelFileError) as before_a_group_starts:
        resolve_vae(str(path), "auto", devices=parse_devices("cpu", visible_cuda=0))
    assert str(before_a_group_starts.value) == message
    assert words in message
    assert "wan2.2_vae.safetensors" in message or "download it again" in message
    assert "\n" not in message


def test_truncated_file_is_refused(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = tmp_path / "vae.safetensors"
    save_file(weights, path)
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(ModelFileError, match=r"^vae\.safetensors has .* download it again"):
        loaded(path)
