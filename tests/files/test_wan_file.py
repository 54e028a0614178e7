"""Which transformer a file holds, by the names and shapes of its tensors, and what is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from file_kit import SHAPE, refusal
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import KNOWN_MODELS, WanShape
from comfy_wan_dist.model_file.encoding import TensorEntry
from comfy_wan_dist.model_file.header import (
    ModelFile,
    read_model_file,
)
from comfy_wan_dist.model_file.names import PREFIXES
from comfy_wan_dist.model_file.wan import SUPPORTED, read_wan_file
from devtools.checkpoints import TINY_VAE, transformer_weights, vae_weights


def model_file(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F16") -> ModelFile:
    """A file of these tensors, without the file."""
    entries = {
        name: TensorEntry(dtype=dtype, shape=shape, path="some.safetensors", start=0, stop=0)
        for name, shape in shapes.items()
    }
    return ModelFile(path="folder/some.safetensors", entries=entries, file_bytes=0, mtime_ns=0)


def wan_shapes(shape: WanShape = SHAPE) -> dict[str, tuple[int, ...]]:
    return expected_parameters(shape)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_wan_file_is_recognised_behind_a_prefix(prefix: str) -> None:
    shapes = {prefix + name: shape for name, shape in wan_shapes().items()}
    file = read_wan_file(model_file(shapes))
    assert file.shape == SHAPE
    assert set(file.entries) == set(wan_shapes())


def test_tensors_beside_the_prefix_are_left_alone() -> None:
    shapes = {"model.diffusion_model." + name: shape for name, shape in wan_shapes().items()}
    file = read_wan_file(model_file(shapes | {"first_stage_model.decoder.conv1.weight": (1,)}))
    assert set(file.entries) == set(wan_shapes())


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        ("ti2v-5b", 825, 4_999_787_712),
        ("t2v-14b", 1095, 14_288_491_584),
        ("i2v-14b", 1095, 14_288_901_184),
        ("t2v-1.3b", 825, 1_418_996_800),
    ],
)
def test_models_of_the_family_are_recognised(model: str, tensors: int, parameters: int) -> None:
    shapes = wan_shapes(KNOWN_MODELS[model])
    assert len(shapes) == tensors
    assert sum(torch.Size(s).numel() for s in shapes.values()) == parameters
    assert read_wan_file(model_file(shapes)).shape == KNOWN_MODELS[model]


def test_missing_tensors_are_named() -> None:
    shapes = wan_shapes()
    del shapes["blocks.1.ffn.2.bias"], shapes["text_embedding.2.weight"]
    message = refusal(lambda: read_wan_file(model_file(shapes)))
    assert message.startswith("some.safetensors lacks 2 tensors, the first is blocks.1.ffn.2.bias;")


@pytest.mark.parametrize(
    "name",
    [
        "patch_embedding.weight",
        "head.head.weight",
        "blocks.0.ffn.0.weight",
        "text_embedding.0.weight",
    ],
)
def test_missing_tensor_that_tells_the_shape_is_named(name: str) -> None:
    shapes = wan_shapes()
    del shapes[name]
    assert f"lacks the tensor {name}" in refusal(lambda: read_wan_file(model_file(shapes)))


@pytest.mark.parametrize(
    "name", ["blocks.0.extra", "extra", "blocks.0.ffn.0.zero_point", "blocks.70000.x"]
)
def test_extra_tensor_is_refused_by_name(name: str) -> None:
    message = refusal(lambda: read_wan_file(model_file(wan_shapes() | {name: (1,)})))
    assert (
        f"has 1 tensors that a supported Wan model does not have, '{name}'; it is another kind"
        in message
    )


def test_extra_tensors_are_listed() -> None:
    extra = {f"blocks.0.extra{i}": (1,) for i in range(5)}
    message = refusal(lambda: read_wan_file(model_file(wan_shapes() | extra)))
    listed = "'blocks.0.extra0', 'blocks.0.extra1', 'blocks.0.extra2' and 2 more"
    assert f"has 5 tensors that a supported Wan model does not have, {listed}; it is" in message
    long = {"blocks.0." + "x\n" * 1000: (1,)}
    assert "1 tensors" in refusal(lambda: read_wan_file(model_file(wan_shapes() | long)))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blocks.0.self_attn.q.weight", (128, 64), "its other tensors ask for [128, 128]"),
        ("blocks.1.ffn.0.bias", (65,), "its other tensors ask for [64]"),
        ("head.modulation", (2, 128), "head.modulation has shape [2, 128]; it must have 3 dims"),
        ("head.modulation", (1, 2, 130), "width 130, which is no multiple of 128"),
        ("head.modulation", (1, 2, 0), "width 0"),
        ("blocks.0.ffn.0.weight", (0, 128), "widths that no Wan model has: ffn_dim 0, text_dim 16"),
        ("text_embedding.0.weight", (128, 0), "text_dim 0, freq_dim 8; download it again"),
        ("time_embedding.0.weight", (128, 7), "freq_dim 7;"),
        ("patch_embedding.weight", (128, 192), "must have 5 dims"),
        ("text_embedding.0.weight", (), "must have 2 dims"),
    ],
)
def test_tensor_of_another_shape_is_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    assert message in refusal(lambda: read_wan_file(model_file(wan_shapes() | {name: shape})))


@pytest.mark.parametrize("dtype", ["C64", "F8_E8M0", "U8", "I64"])
def test_weights_of_another_type_are_refused(dtype: str) -> None:
    message = refusal(lambda: read_wan_file(model_file(wan_shapes(), dtype)))
    assert (
        f"as {dtype}, which is not supported; choose an fp8 (e4m3fn or e5m2), GGUF, 16- or 32-bit file"
        in message
    )


@pytest.mark.parametrize(
    ("dim", "in_dim", "out_dim", "name"),
    [
        (5120, 48, 16, "a Wan2.1 Fun-Control model with 48 input and 16 output channels"),
        (5120, 52, 16, "a Wan2.2 Fun-Control model"),
        (3072, 100, 48, "a Wan2.2 Fun-InP 5B model with 100 input and 48 output channels"),
        (3072, 96, 48, "a Lucy-Edit model"),
        (5120, 16, 48, "a Wan variant of width 5120 with 16 input and 48 output channels"),
    ],
)
def test_wan_models_of_another_kind_are_refused_by_name(
    dim: int, in_dim: int, out_dim: int, name: str
) -> None:
    shape = WanShape(dim=dim, ffn_dim=64, num_layers=1, in_dim=in_dim, out_dim=out_dim)
    message = refusal(lambda: read_wan_file(model_file(wan_shapes(shape))))
    assert f"some.safetensors is {name}" in message
    assert f"choose a {SUPPORTED} file" in message


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("vace_patch_embedding.weight", "a Wan VACE model"),
        ("img_emb.proj.0.bias", "a Wan2.1 image-to-video model"),
        ("face_adapter.fuser_blocks.0.k_norm.weight", "a Wan Animate model"),
        ("patch_embedding_mask.weight", "a SCAIL 2 model"),
        ("patch_embedding_pose.weight", "a SCAIL model"),
        ("patch_embedding_global.weight", "a WanDancer model"),
        ("audio_proj.proj1.weight", "a MultiTalk or InfiniteTalk model"),
    ],
)
def test_siblings_are_refused_by_name(tensor: str, kind: str) -> None:
    message = refusal(lambda: read_wan_file(model_file(wan_shapes() | {tensor: (1,)})))
    assert (
        message == f"some.safetensors is {kind}, which is not supported; choose a {SUPPORTED} file"
    )


def test_infinitetalk_alone_is_refused_by_name() -> None:
    patch = {"blocks.0.audio_cross_attn.q_linear.weight": (4, 4), "audio_proj.proj1.weight": (4, 4)}
    message = refusal(lambda: read_wan_file(model_file(patch)))
    assert message.startswith("some.safetensors is a MultiTalk or InfiniteTalk model, which is not")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"model_type": "flow_rvs"}, "a Wan model of the type 'flow_rvs'"),
        ({"model_type": "t2v", "causal_ar": True}, "a causal Wan model"),
        ({"model_type": "next\nyear"}, r"a Wan model of the type 'next\nyear'"),
    ],
)
def test_siblings_that_only_metadata_tells_are_refused_by_name(
    settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "some.safetensors"
    save_file(
        transformer_weights(SHAPE, seed=1),
        path,
        metadata={"config": json.dumps({"transformer": settings})},
    )
    message = refusal(lambda: read_wan_file(read_model_file(str(path))))
    assert (
        message == f"some.safetensors is {kind}, which is not supported; choose a {SUPPORTED} file"
    )


@pytest.mark.parametrize(
    "config",
    [
        *(json.dumps({"transformer": {"model_type": kind}}) for kind in ("t2v", "i2v", "ti2v")),
        '{"transformer": {"causal_ar": false, "dim": 5120}}',
        '{"transformer": []}',
        '{"vae": {}}',
        "[1]",
        "lr: 1e-4",
        "[" * 100_000,
    ],
)
def test_other_metadata_does_not_matter(config: str, tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file(transformer_weights(SHAPE, seed=1), path, metadata={"config": config})
    assert read_wan_file(read_model_file(str(path))).shape == SHAPE


def test_metadata_does_not_make_a_file_wan() -> None:
    config = json.dumps({"transformer": {"model_type": "flow_rvs"}})
    file = replace(model_file({"something": (4, 4)}), metadata={"config": config})
    assert "is not a Wan transformer" in refusal(lambda: read_wan_file(file))


def vae_names() -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in vae_weights(TINY_VAE, seed=0).items()}


@pytest.mark.parametrize(
    ("shapes", "guess"),
    [
        (vae_names(), "it looks like a VAE"),
        (
            {"encoder.block.0.layer.0.SelfAttention.q.weight": (4, 4)},
            "it looks like a text encoder",
        ),
        ({"diffusion_model.blocks.0.ffn.0.lora_A.weight": (4, 4)}, "it looks like a LoRA"),
        ({"something": (4, 4)}, "its 1 tensors have other names"),
        ({}, "its 0 tensors have other names"),
    ],
)
def test_other_models_are_refused_by_what_they_look_like(
    shapes: dict[str, tuple[int, ...]], guess: str
) -> None:
    message = refusal(lambda: read_wan_file(model_file(shapes)))
    assert (
        message == f"some.safetensors is not a Wan transformer: {guess}; choose a {SUPPORTED} file"
    )


def test_file_name_does_not_matter(tmp_path: Path) -> None:
    weights: dict[str, Tensor] = transformer_weights(SHAPE, seed=1)
    path = tmp_path / "wan2.1_vae_14B_fp8.safetensors"
    save_file(weights, path)
    assert read_wan_file(read_model_file(str(path))).shape == SHAPE
