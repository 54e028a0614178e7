"""Scaled fp8 files with something odd in them, every case that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import transformer_weights
from devtools.quantised import ScaledForm, write_scaled_fp8

TINY = WanShape(
    dim=128, ffn_dim=64, num_layers=1, in_dim=48, out_dim=48, text_dim=4096, freq_dim=256
)
LAYER = "blocks.0.ffn.0"


def scaled(path: Path, change: Callable[[dict[str, Tensor]], None], form: ScaledForm) -> Path:
    """A scaled file, changed."""
    write_scaled_fp8(path, transformer_weights(TINY, seed=1), form)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


def remove(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, value)


def text(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


ODD: dict[str, tuple[ScaledForm, Callable[[dict[str, Tensor]], None], str]] = {
    "no scale": (
        ScaledForm.NEW,
        remove(f"{LAYER}.weight_scale"),
        f"the scaled weight '{LAYER}.weight' has no scale beside it (scale_weight or weight_scale)",
    ),
    "scales of rows": (
        ScaledForm.OLD,
        put(f"{LAYER}.scale_weight", torch.ones(64)),
        f"the scale '{LAYER}.scale_weight' is F32 [64]; only one number for the whole weight is supported",
    ),
    "complex scale": (
        ScaledForm.OLD,
        put(f"{LAYER}.scale_weight", torch.tensor(1.0 + 0j)),
        f"the scale '{LAYER}.scale_weight' is C64 []; only one number for the whole weight is supported",
    ),
    "two scales": (
        ScaledForm.NEW,
        put(f"{LAYER}.scale_weight", torch.tensor(1.0)),
        f"has both '{LAYER}.scale_weight' and '{LAYER}.weight_scale'",
    ),
    "format of another type": (
        ScaledForm.NEW,
        put(f"{LAYER}.weight", torch.ones(64, 128)),
        f"'{LAYER}.weight' as 'float8_e4m3fn' in F32, which is not supported",
    ),
    "scaled vector": (
        ScaledForm.OLD,
        put("blocks.0.norm3.scale_weight", torch.tensor(1.0)),
        "'blocks.0.norm3.weight' is BF16 [128] and has a scale, which only matrices in fp8 may have",
    ),
    "another format": (
        ScaledForm.NEW,
        put(f"{LAYER}.comfy_quant", text({"format": "nvfp4"})),
        f"'{LAYER}.weight' as 'nvfp4' in F8_E4M3, which is not supported; choose an fp8",
    ),
    "nvfp4": (
        ScaledForm.OLD,
        put(f"{LAYER}.weight_scale_2", torch.tensor(1.0)),
        f"'{LAYER}.weight' as 'nvfp4' in F8_E4M3, which is not supported",
    ),
    "no format": (
        ScaledForm.NEW,
        put(f"{LAYER}.comfy_quant", text([1])),
        f"'{LAYER}.comfy_quant' is not the JSON of a format",
    ),
    "format without weight": (
        ScaledForm.NEW,
        put("blocks.0.ffn.1.comfy_quant", text({"format": "float8_e4m3fn"})),
        "has 'blocks.0.ffn.1.comfy_quant' without the weight that it belongs to",
    ),
    "int8 bias": (
        ScaledForm.NEW,
        put(f"{LAYER}.bias", torch.ones(64, dtype=torch.int8)),
        f"'{LAYER}.bias' as I8, which is not supported",
    ),
    "extra tensor": (
        ScaledForm.OLD,
        put("blocks.0.extra", torch.ones(1)),
        "has 1 tensors that a supported Wan model does not have, 'blocks.0.extra'",
    ),
    "missing tensor": (
        ScaledForm.OLD,
        remove("blocks.0.ffn.2.bias"),
        "lacks 1 tensors, the first is blocks.0.ffn.2.bias",
    ),
}
"""By name: a form, how it is changed, and what the sentence says."""
