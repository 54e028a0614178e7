"""Recognise a Wan transformer by its tensors' names and shapes, never by its file name.

Covers TI2V-5B, T2V and I2V without CLIP images (A14B), Wan2.1 T2V, under whatever names names.py knows. Other models
are refused by name.
Source: key tables of the official Wan2.2 and Wan2.1 checkpoints.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ..ipc.errors import ModelFileError
from ..mesh.dtypes import FLOATS, FP8
from ..mesh.parameters import expected_parameters
from ..mesh.shape import HEAD_DIM, PATCH_POSITIONS, WanShape
from .encoding import StoredTensor, layer_formats, packed_weights, read_encodings
from .expected import Found
from .header import ModelFile
from .names import describe, find_naming, listed, official_tensors, shown

FAMILY = ((48, 48), (16, 16), (36, 16))
"""Input and output channels of TI2V, text-to-video, image-to-video."""
SUPPORTED = "TI2V-5B, T2V-A14B, I2V-A14B or Wan2.1 T2V"

SIBLINGS = (
    ("vace_patch_embedding.weight", "a Wan VACE model"),
    ("control_adapter.conv.weight", "a Wan camera-control model"),
    ("ref_conv.weight", "a Wan Fun-Control model"),
    ("casual_audio_encoder.encoder.final_linear.weight", "a Wan S2V model"),
    ("audio_proj.audio_proj_glob_1.layer.bias", "a HuMo model"),
    ("face_adapter.fuser_blocks.0.k_norm.weight", "a Wan Animate model"),
    ("patch_embedding_mask.weight", "a SCAIL 2 model"),
    ("patch_embedding_pose.weight", "a SCAIL model"),
    ("patch_embedding_global.weight", "a WanDancer model"),
    ("audio_proj.proj1.weight", "a MultiTalk or InfiniteTalk model"),
    ("img_emb.proj.0.bias", "a Wan2.1 image-to-video model"),
)
MODEL_TYPES = ("t2v", "i2v", "ti2v")
"""Of the official code, as settings in a file's metadata name them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WanFile:
    """A recognised transformer: its sizes, and how each official parameter is stored. note: for the report, or ''."""

    shape: WanShape
    entries: Mapping[str, StoredTensor]
    file: ModelFile
    note: str = ""

    @property
    def dtype(self) -> str:
        """The type that the file would be computed in: of most of its plain matrices, or else of a bias."""
        sizes: Counter[str] = Counter()
        for tensor in self.entries.values():
            if len(tensor.shape) == 2:
                sizes[tensor.entry.dtype] += prod(tensor.shape)
        of_bias = self.entries["blocks.0.ffn.0.bias"].entry.dtype
        found = (*(dtype for dtype, _ in sizes.most_common()), of_bias)
        return next((dtype for dtype in found if dtype in FLOATS), "F32")


def read_wan_file(file: ModelFile) -> WanFile:
    """Recognise `file`. Raises ModelFileError naming what it is instead, or what it lacks."""
    label = Path(file.path).name
    naming = find_naming(file.entries)
    entries, told = file.entries, ""
    if naming is not None:
        entries = official_tensors(entries, naming, label=label)
        told = _kind_in_settings(file.metadata)
    if kind := next((kind for key, kind in SIBLINGS if key in entries), told):
        raise ModelFileError(
            f"{label} is {kind}, which is not supported; choose a {SUPPORTED} file"
        )
    if naming is None:
        raise ModelFileError(
            f"{label} is not a Wan transformer: {describe(entries)}; choose a {SUPPORTED} file"
        )
    found = Found(
        shapes={name: entry.shape for name, entry in entries.items()},
        label=label,
        model="a supported Wan model",
        remedy=f"download it again, or choose a {SUPPORTED} file",
    )
    shape = _shape_of(found)
    layers = layer_formats(file.metadata, naming, label=label)
    stored = read_encodings(entries, layers=layers, label=label)
    found = replace(found, shapes={name: found.shapes[name] for name in stored})
    found.require(expected_parameters(shape))
    packed = tuple(packed_weights(stored))
    bare = [name for name, packing in packed if packing.encoding in FP8 and not packing.is_scaled]
    is_partial = bare and any(packing.is_scaled for _, packing in packed)
    note = f"{label} has no scale for {listed(bare)}; 1 is taken" if is_partial else ""
    return WanFile(shape=replace(shape, packed=packed), entries=stored, file=file, note=note)


def validate_experts(high: WanFile, low: WanFile) -> None:
    """Refuse two files that are not the experts of one model. Raises ModelFileError."""
    label = Path(low.file.path).name
    if high.file.path == low.file.path:
        raise ModelFileError(
            f"{label} is named for high and for low noise; choose the other expert's file, or none for a model without"
        )
    for name in ("in_dim", "out_dim", "dim", "ffn_dim", "num_layers", "text_dim", "freq_dim"):
        ours, theirs = getattr(high.shape, name), getattr(low.shape, name)
        if ours != theirs:
            raise ModelFileError(
                f"{label} has {name} {theirs}, {Path(high.file.path).name} {ours}; choose the two experts of one model"
            )


def _kind_in_settings(metadata: Mapping[str, str]) -> str:
    """What ComfyUI (0.28) takes a file for that only the settings in its metadata tell from a supported model."""
    try:
        settings = json.loads(metadata["config"])["transformer"]
        if settings.get("causal_ar"):
            return "a causal Wan model"
        name = settings.get("model_type", MODEL_TYPES[0])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    return "" if name in MODEL_TYPES else f"a Wan model of the type {shown(name)}"


def _shape_of(found: Found) -> WanShape:
    label = found.label
    dim = found.shape("head.modulation", 3)[2]
    in_dim = found.shape("patch_embedding.weight", 5)[1]
    token_dim = found.shape("head.head.weight", 2)[0]
    if dim == 0 or dim % HEAD_DIM:
        raise ModelFileError(
            f"{label} has width {dim}, which is no multiple of {HEAD_DIM}: no Wan model has that"
        )
    if token_dim % PATCH_POSITIONS or (in_dim, token_dim // PATCH_POSITIONS) not in FAMILY:
        raise ModelFileError(
            f"{label} is {_name_by_channels(in_dim, dim)} with {in_dim} input and {token_dim // PATCH_POSITIONS} "
            f"output channels, which is not supported; choose a {SUPPORTED} file"
        )
    blocks = {
        int(match[1])
        for name in found.shapes
        if (match := re.match(r"blocks\.([0-9]{1,4})\.", name))
    }
    if not blocks:
        raise ModelFileError(f"{label} has no blocks; the file is incomplete: download it again")
    shape = WanShape(
        dim=dim,
        ffn_dim=found.shape("blocks.0.ffn.0.weight", 2)[0],
        num_layers=max(blocks) + 1,
        in_dim=in_dim,
        out_dim=token_dim // PATCH_POSITIONS,
        text_dim=found.shape("text_embedding.0.weight", 2)[1],
        freq_dim=found.shape("time_embedding.0.weight", 2)[1],
    )
    if 0 in (shape.ffn_dim, shape.text_dim, shape.freq_dim) or shape.freq_dim % 2:
        raise ModelFileError(
            f"{label} has widths that no Wan model has: ffn_dim {shape.ffn_dim}, text_dim {shape.text_dim}, "
            f"freq_dim {shape.freq_dim}; download it again"
        )
    return shape


def _name_by_channels(in_dim: int, dim: int) -> str:
    kinds = {
        48: "a Wan2.1 Fun-Control model",
        52: "a Wan2.2 Fun-Control model",
        96: "a Lucy-Edit model",
        100: "a Wan2.2 Fun-InP 5B model",
    }
    return kinds.get(in_dim, f"a Wan variant of width {dim}")
