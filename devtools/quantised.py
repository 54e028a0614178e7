"""Quantised forms of a checkpoint, written by torch's casts and the `gguf` package, for tests and parity.

Each writer returns what the file's values are, in float32, from the same independent sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .references import TRANSFORMER_NAMES, renamed

WRITABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
"""GGUF types that the package can quantise to."""
RANDOM = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Others, for which random blocks stand in."""


class ScaledForm(Enum):
    """How a scaled fp8 file tells that it is one."""

    OLD = "scaled_fp8 and scale_weight"
    NEW = "comfy_quant and weight_scale"
    METADATA = "metadata and weight_scale"


def write_fp8(
    path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, *, only_matrices: bool
) -> dict[str, Tensor]:
    """Plain fp8; what is no matrix stays bfloat16 if `only_matrices`."""
    stored = {
        name: value.to(torch.bfloat16 if only_matrices and value.dim() != 2 else dtype)
        for name, value in weights.items()
    }
    save_file(stored, path)
    return {name: value.float() for name, value in stored.items()}


def write_scaled_fp8(
    path: Path,
    weights: Mapping[str, Tensor],
    form: ScaledForm,
    *,
    prefix: str = "",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> dict[str, Tensor]:
    """Matrices in fp8 with one scale each, chosen so that the largest value is fp8's largest; the rest in bfloat16."""
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Any]] = {}
    conf = {"format": str(dtype).removeprefix("torch.")}
    for name, value in weights.items():
        if value.dim() != 2:
            stored[name] = value.bfloat16()
            values[name] = stored[name].float()
            continue
        scale = value.abs().max() / torch.finfo(dtype).max
        layer = name.removesuffix(".weight")
        stored[name] = (value / scale).to(dtype)
        values[name] = stored[name].float() * scale
        if form is ScaledForm.OLD:
            stored[f"{layer}.scale_weight"] = scale
            stored[f"{layer}.scale_input"] = torch.tensor(1.0)
            continue
        stored[f"{layer}.weight_scale"] = scale
        stored[f"{layer}.input_scale"] = torch.tensor(0.5)
        layers[layer] = conf
        if form is ScaledForm.NEW:
            text = json.dumps(conf | {"full_precision_matrix_mult": True}).encode()
            stored[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if form is ScaledForm.OLD:
        stored["scaled_fp8"] = torch.zeros(2, dtype=dtype)
    metadata = None
    if form is ScaledForm.METADATA:
        text_of_all = json.dumps({"format_version": "1.0", "layers": layers})
        metadata = {"_quantization_metadata": text_of_all}
    save_file({prefix + name: value for name, value in stored.items()}, path, metadata=metadata)
    return values


ODD_WEIGHTS = ("blocks.0.self_attn.o.weight", "blocks.0.ffn.0.weight", "blocks.0.ffn.2.weight")


def write_odd_scaled_fp8(
    path: Path, weights: Mapping[str, Tensor], *, marker: torch.dtype = torch.float8_e4m3fn
) -> dict[str, Tensor]:
    """An older scaled file in which one weight has no scale, and two that have one are of other types than the rest.

    ComfyUI takes the missing one for 1, and rounds the others before they are scaled: to the type of the marker, of
    which it takes float32 for e4m3fn.
    """
    bare, wide, other = ODD_WEIGHTS
    rounded = torch.float8_e4m3fn if marker is torch.float32 else marker
    own = torch.float8_e5m2 if rounded is torch.float8_e5m2 else torch.float8_e4m3fn
    types = {
        wide: torch.bfloat16,
        other: torch.float8_e4m3fn if own is torch.float8_e5m2 else torch.float8_e5m2,
    }
    values = write_scaled_fp8(path, weights, ScaledForm.OLD, dtype=own)
    stored = load_file(path)
    stored["scaled_fp8"] = torch.zeros(2, dtype=marker)
    del stored[bare.replace("weight", "scale_weight")]
    values[bare] = stored[bare].float()
    for name, dtype in types.items():
        scale = weights[name].abs().max() / 100
        stored[name.replace("weight", "scale_weight")] = scale
        stored[name] = (weights[name] / scale).to(dtype)
        values[name] = stored[name].to(rounded).float() * scale
    save_file(stored, path)
    return values


def write_modelopt(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Two shards in diffusers' names, matrices in fp8 with scales [1] that lie in the other shard.

    path: of the first shard.
    """
    shards: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    values = {}
    for index, (name, value) in enumerate(weights.items()):
        path_there, dot, leaf = renamed(name, TRANSFORMER_NAMES).rpartition(".")
        here, there = shards[index % 2], shards[1 - index % 2]
        if value.dim() != 2:
            here[f"{path_there}{dot}{leaf}"] = value.bfloat16()
            values[name] = value.bfloat16().float()
            continue
        dtype = (torch.float32, torch.bfloat16)[index % 4 // 2]
        scale = (value.abs().max() / 448).to(dtype).view(1)
        here[f"{path_there}.weight"] = (value / scale.float()).to(torch.float8_e4m3fn)
        there[f"{path_there}.weight_scale"] = scale
        there[f"{path_there}.input_scale"] = torch.ones(1, dtype=dtype)
        values[name] = here[f"{path_there}.weight"].float() * scale.float()
    stem = path.name.removesuffix("-00001-of-00002.safetensors")
    names = [f"{stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, path.with_name(name))
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index_path = path.with_name(f"{stem}.safetensors.index.json")
    index_path.write_text(json.dumps({"weight_map": weight_map}))
    return values


def write_gguf(
    path: Path,
    weights: Mapping[str, Tensor],
    types: tuple[str, ...],
    *,
    architecture: str = "wan",
    is_reshaped: bool = True,
    only_matrices: bool = True,
    tensors_a_part: int = 0,
) -> dict[str, Tensor]:
    """Matrices in the given types in turn, what is not a matrix in float32, or float16 where it has 5 dims.

    is_reshaped: what has 5 dims lies there as a matrix, with its shape beside it. only_matrices: else the types are for
    all tensors whose rows have whole blocks. tensors_a_part: if not 0, there are files of so many each.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_part)
    writer.add_string("general.name", "test")
    writer.add_array("test.words", ["one", "two", "three"])
    writer.add_array("test.numbers", list(range(50)))
    values = {}
    turn = 0
    for name, value in weights.items():
        array = value.float().numpy()
        if not only_matrices and array.size % 32 == 0 and not (array.ndim == 5 and not is_reshaped):
            if array.ndim == 5:
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(array.shape))
                array = array.reshape(array.shape[0], -1)
            kind = gguf.GGMLQuantizationType[types[turn % len(types)]]
            turn += 1
            blocks = gguf.quants.quantize(array, kind)
            values[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
            writer.add_tensor(name, blocks, raw_dtype=kind)
        elif array.ndim == 2:
            kind = gguf.GGMLQuantizationType[types[turn % len(types)]]
            turn += 1
            blocks = _quantised(array, kind, seed=turn)
            values[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
            writer.add_tensor(name, blocks, raw_dtype=kind)
        elif array.ndim == 5:
            shape = array.shape
            half = array.astype(np.float16)
            values[name] = torch.from_numpy(half.astype(np.float32))
            if is_reshaped:
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
                half = half.reshape(shape[0], -1)
            writer.add_tensor(name, half)
        else:
            values[name] = torch.from_numpy(array)
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: value.reshape(weights[name].shape) for name, value in values.items()}


def _quantised(array: np.ndarray, kind: gguf.GGMLQuantizationType, *, seed: int) -> np.ndarray:
    if kind.name in WRITABLE:
        return gguf.quants.quantize(array, kind)
    items, size = gguf.GGML_QUANT_SIZES[kind]
    return random_blocks(kind, array.shape[0], array.shape[1] // items, seed=seed, spread=1e-3)


def random_blocks(
    kind: gguf.GGMLQuantizationType, rows: int, count: int, *, seed: int, spread: float
) -> np.ndarray:
    """Blocks [rows, count * bytes] of random bits whose scales are float16 numbers below `spread`."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, count, size), dtype=np.uint8)
    for place in SCALE_PLACES[kind.name]:
        scales = (generator.random((rows, count, 1)) * spread).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


SCALE_PLACES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where float16 numbers are in a block."""
