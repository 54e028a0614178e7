"""Write small seeded checkpoints of the real architecture, for tests, parity, benchmarks and the demo."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.mesh.dtypes import BY_NAME
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.vae_parameters import vae_parameters
from comfy_wan_dist.mesh.vae_shape import VAEConfig

TINY_TRANSFORMER = WanShape(dim=512, ffn_dim=1024, num_layers=3, in_dim=48, out_dim=48)
TINY_VAE = VAEConfig(z_dim=48, encoder_dim=16, decoder_dim=16)


def transformer_weights(
    shape: WanShape, *, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Seeded weights in which every parameter matters: norms and biases are not at their identity values."""
    return _random_weights(expected_parameters(shape), seed=seed, dtype=dtype)


def vae_weights(
    config: VAEConfig, *, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    return _random_weights(vae_parameters(config), seed=seed, dtype=dtype)


def write_transformer(
    path: Path, shape: WanShape, *, seed: int, dtype: torch.dtype = torch.float32
) -> None:
    _write_weights(path, expected_parameters(shape), seed=seed, dtype=dtype)


def write_vae(path: Path, config: VAEConfig, *, seed: int) -> None:
    _write_weights(path, vae_parameters(config), seed=seed, dtype=torch.float32)


def write_shards(folder: Path, weights: Mapping[str, Tensor], *, parts: int) -> list[Path]:
    """These weights in `parts` files with an index, named as the official ones; returns the files."""
    stem = "diffusion_pytorch_model"
    paths = [folder / f"{stem}-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
    weight_map = {name: paths[i % parts] for i, name in enumerate(weights)}
    for path in paths:
        save_file({name: weights[name] for name in weights if weight_map[name] == path}, path)
    index = {"metadata": {}, "weight_map": {name: path.name for name, path in weight_map.items()}}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return paths


def _random_weights(
    shapes: Mapping[str, tuple[int, ...]], *, seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: _value(name, shape, generator).to(dtype) for name, shape in shapes.items()}


def _write_weights(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, seed: int, dtype: torch.dtype
) -> None:
    """`_random_weights` as a safetensors file. Holds one tensor at a time, however large the file."""
    code = BY_NAME[str(dtype).removeprefix("torch.")].code
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for name, shape in shapes.items():
            value = _value(name, shape, generator).to(dtype)
            file.write(value.flatten().view(torch.uint8).numpy().data)


def _value(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise: Tensor = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith("gamma"):
        return noise * 0.1 + (0 if name.endswith("bias") else 1)
    if name.endswith("modulation"):
        return noise / shape[-1] ** 0.5
    if name.endswith("bias"):
        return noise * 0.1
    fan_in = noise[0].numel()
    return noise / fan_in**0.5
