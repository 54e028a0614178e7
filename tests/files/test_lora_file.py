"""LoRA files before anything is merged: what their keys mean, and what is refused in one sentence.

Covered: names of every spelling, files of others' making that this model cannot take, damage, alpha's number types,
and any keys at all. Not covered: what is merged (test_lora.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from file_kit import refusal
from hypothesis import given
from hypothesis import strategies as st
from lora_headers import REFUSED, Q, entry, pair
from safetensors.torch import save_file

from comfy_wan_dist.ipc.errors import ConfigError, ModelFileError
from comfy_wan_dist.jobs.handle import ModelHandle
from comfy_wan_dist.mesh.dtypes import BY_NAME
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import TI2V_5B, WanShape
from comfy_wan_dist.model_file.encoding import TensorEntry
from comfy_wan_dist.model_file.header import content_of, read_model_file
from comfy_wan_dist.model_file.lora import HALVES, LoraFile, parse_lora, read_lora, read_scalar
from comfy_wan_dist.model_file.lora_names import Part, Role, read_key
from comfy_wan_dist.model_file.lora_patch import extent
from devtools.loras import SPELLINGS, mixed_lora, plain_lora, spelled

SHAPE = WanShape(dim=128, ffn_dim=64, num_layers=3, in_dim=48, out_dim=48, text_dim=16, freq_dim=8)
SHAPES = expected_parameters(SHAPE)


def parse(
    entries: Mapping[str, TensorEntry],
    shape: WanShape = SHAPE,
    alpha: float = 2,
    half: str = "",
) -> LoraFile:
    return parse_lora(
        entries,
        shape,
        label="some.safetensors",
        alpha=None,
        read_scalar=lambda entry: alpha,
        half=half,
    )


# ---- names


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_parameter_is_found_under_every_spelling(spelling: str) -> None:
    """Each weight and modulation by its own name, each bias by its module's."""
    parts = {
        name: {"diff": torch.zeros(shape)}
        for name, shape in SHAPES.items()
        if not name.endswith("bias")
    }
    for name in SHAPES:
        if name.endswith("bias"):
            parts[f"{name.removesuffix('bias')}weight"]["bias"] = torch.zeros(SHAPES[name])
    entries = {key: entry(*value.shape) for key, value in spelled(parts, spelling).items()}
    file = parse(entries)
    assert file.patches.keys() == SHAPES.keys()
    assert file.unknown == ()


@pytest.mark.parametrize(
    ("key", "parameter", "role"),
    [
        ("blocks.3.ffn.2.lora_A.weight", "blocks.3.ffn.2.weight", Role.DOWN),
        ("blocks.3.ffn.2.lora_B.my_adapter.weight", "blocks.3.ffn.2.weight", Role.UP),
        ("blocks.3.ffn.2.lora_A", "blocks.3.ffn.2.weight", Role.DOWN),
        ("transformer.proj_out.lora_B.bias", "head.head.bias", Role.UP_BIAS),
        ("blocks.3.ffn.2.lora_B.default.bias", "blocks.3.ffn.2.bias", Role.UP_BIAS),
        ("blocks.3.ffn.2.lora.up.weight", "blocks.3.ffn.2.weight", Role.UP),
        ("transformer.blocks.12.attn2.to_out.0.alpha", "blocks.12.cross_attn.o.weight", Role.ALPHA),
        ("transformer.blocks.1.norm2.diff", "blocks.1.norm3.weight", Role.DIFFERENCE),
        ("base_model.model.diffusion_model.head.head.diff_b", "head.head.bias", Role.DIFFERENCE),
        ("lora_unet_blocks_10_attn1_to_q.lora_up.weight", "blocks.10.self_attn.q.weight", Role.UP),
        ("diffusion_model.blocks.3.diff_m", "blocks.3.modulation", Role.DIFFERENCE),
        ("diffusion_model.head.diff_m", "head.modulation", Role.DIFFERENCE),
        ("lora_unet__blocks_0_ffn_0.alpha", "blocks.0.ffn.0.weight", Role.ALPHA),
        ("lycoris_blocks_0_ffn_net_2.lokr_w1_a", "blocks.0.ffn.2.weight", Role.LOKR_W1_A),
        ("lycoris_blocks_1_self_attn_to_out_0.alpha", "blocks.1.self_attn.o.weight", Role.ALPHA),
        ("lora_unet_time_projection_1.hada_w2_b", "time_projection.1.weight", Role.HADA_W2_B),
        (
            "diffusion_model.blocks.0.self_attn.q.bias.diff",
            "blocks.0.self_attn.q.bias",
            Role.DIFFERENCE,
        ),
        ("diffusion_model.blocks.0.modulation.diff", "blocks.0.modulation", Role.DIFFERENCE),
        ("transformer.scale_shift_table.set_weight", "head.modulation", Role.VALUE),
        ("transformer.blocks.0.scale_shift_table.diff", "blocks.0.modulation", Role.DIFFERENCE),
        ("unet.blocks.0.norm3.w_norm", "blocks.0.norm3.weight", Role.DIFFERENCE),
        ("unet.blocks.0.norm3.b_norm", "blocks.0.norm3.bias", Role.DIFFERENCE),
        ("blocks.0.self_attn.q.dora_scale", "blocks.0.self_attn.q.weight", Role.DORA),
    ],
)
def test_key_means(key: str, parameter: str, role: Role) -> None:
    assert read_key(key) == Part(parameter=parameter, role=role)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "alpha",
        ".alpha",
        "blocks.0.self_attn.q.weight",
        "blocks.0.self_attn.q.lora_A.bias",
        "blocks.00000.self_attn.q.alpha",
        "blocks.x.self_attn.q.alpha",
        "blocks_0_self_attn_q.alpha",
        "lora_unet_blocks.0.self_attn.q.alpha",
        "lora_unet_blocks_0_self_attn_z.alpha",
        "lora_te_text_model_encoder_layers_0_mlp_fc1.alpha",
        "transformer.blocks.0.attn1.to_z.lora_A.weight",
    ],
)
def test_key_is_not_known(key: str) -> None:
    assert read_key(key) is None


def test_unknown_keys_are_listed_in_order_with_their_number() -> None:
    strange = {f"strange.{index}": entry(1) for index in range(14)}
    beside = {f"{Q}.alpha": entry(), "diffusion_model.blocks.0.self_attn.k.alpha": entry()}
    file = parse(strange | pair(Q) | beside)
    assert file.unknown == (*strange, "diffusion_model.blocks.0.self_attn.k.alpha")
    said = file.describe(0.25)
    assert said.startswith(
        f"some.safetensors at strength 0.25: 1 of {len(SHAPES)} parameters changed; 15 keys are not"
    )
    assert said.endswith("'strange.9' and 5 more")
    assert "k.alpha" in file.describe(0.25, most=99)


def test_bias_of_an_up_is_scaled_as_the_up() -> None:
    bias = {f"{Q}.lora_B.bias": entry(128)}
    patches = parse(pair(Q) | bias | {f"{Q}.alpha": entry()}, alpha=3).patches
    assert patches["blocks.0.self_attn.q.bias"].scale == 3 / 4
    assert parse(bias).patches["blocks.0.self_attn.q.bias"].scale == 1


@pytest.mark.parametrize(
    "paths",
    [
        ("transformer.blocks.0.attn1.to_q", "transformer_2.blocks.0.attn1.to_q"),
        (
            "diffusion_model.transformer_1.blocks.0.self_attn.q",
            "diffusion_model.transformer_2.blocks.0.self_attn.q",
        ),
    ],
)
def test_second_experts_keys_count_only_without_the_first(paths: tuple[str, str]) -> None:
    first, second = map(pair, paths)
    assert parse(second).unknown == ()
    assert parse(first | second).unknown == tuple(second)
    for half, own in zip(HALVES, (first, second), strict=True):
        file = parse(first | second, half=half)
        assert file.unknown == ()
        (patch,) = file.patches.values()
        assert {factor.name for factor in patch.factors.values()} == set(own)


def test_a_change_of_another_size_is_left_out_and_named() -> None:
    misfits = {
        **pair("diffusion_model.text_embedding.0", 128, 4096),
        "diffusion_model.patch_embedding.diff": entry(128, 36, 1, 2, 2),
        "diffusion_model.patch_embedding.diff_b": entry(64),
    }
    file = parse({**misfits, **pair(Q)})
    assert file.unknown == tuple(misfits)
    assert file.patches.keys() == {"blocks.0.self_attn.q.weight"}


# ---- refusals


@pytest.mark.parametrize("case", REFUSED)
def test_file_is_refused(case: str) -> None:
    entries, message = REFUSED[case]
    assert message in refusal(lambda: parse(entries))


def test_widths_of_the_real_models_are_named() -> None:
    message = refusal(
        lambda: parse(pair("diffusion_model.blocks.0.self_attn.q", 5120, 5120), TI2V_5B)
    )
    assert "width 5120" in message
    assert "3072" in message


@pytest.mark.parametrize("alpha", [math.nan, math.inf])
def test_alpha_must_be_finite_where_it_counts(alpha: float) -> None:
    whole = {f"{Q}.lokr_w1": entry(4, 4), f"{Q}.lokr_w2": entry(32, 32), f"{Q}.alpha": entry()}
    assert [patch.scale for patch in parse(whole, alpha=alpha).patches.values()] == [1]
    message = refusal(lambda: parse(pair(Q) | {f"{Q}.alpha": entry()}, alpha=alpha))
    assert f"is {alpha}; it must be finite" in message


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "complex64"])
def test_scalar_is_what_torch_reads(name: str, tmp_path: Path) -> None:
    """Of types of one byte each value that there is."""
    dtype = getattr(torch, name)
    tensor = torch.tensor([-6.5, 0, 1, 448, 1e-3]).to(dtype)
    if dtype.itemsize == 1 and dtype is not torch.bool:
        tensor = torch.arange(256, dtype=torch.uint8).view(dtype)
    save_file({"x": tensor}, tmp_path / "a.safetensors")
    whole = read_model_file(str(tmp_path / "a.safetensors")).entries["x"]
    for index, expected in enumerate(tensor.tolist()):
        start = whole.start + index * dtype.itemsize
        actual = read_scalar(replace(whole, shape=(), start=start, stop=start + dtype.itemsize))
        assert actual == float(expected) or (math.isnan(actual) and math.isnan(expected))


def read(path: Path) -> LoraFile:
    return read_lora(read_model_file(str(path)), SHAPE)


def write_diffusers(path: Path, config: object, *, own_alpha: bool = False) -> None:
    """A pair of rank 4 as diffusers saves it."""
    module = "transformer.blocks.0.attn1.to_q"
    tensors = {f"{module}.lora_A.weight": torch.zeros(4, 128)}
    tensors[f"{module}.lora_B.weight"] = torch.zeros(128, 4)
    tensors[f"{module}.lora_B.bias"] = torch.zeros(128)
    if own_alpha:
        tensors[f"{module}.alpha"] = torch.tensor(1.0)
    text = config if isinstance(config, str) else json.dumps(config)
    save_file(tensors, path, metadata={"lora_adapter_metadata": text})


def test_alpha_of_diffusers_metadata_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    config = {"transformer.r": 4, "transformer.lora_alpha": 6, "transformer.alpha_pattern": {}}
    config |= {"transformer_2.lora_alpha": 7, "text_encoder.lora_alpha": 8}
    write_diffusers(path, config)
    assert [patch.scale for patch in read(path).patches.values()] == [1.5, 1.5]
    write_diffusers(path, config, own_alpha=True)
    assert [patch.scale for patch in read(path).patches.values()] == [0.25, 0.25]
    write_diffusers(path, config)
    second = read_lora(read_model_file(str(path)), SHAPE, half=HALVES[1])
    assert [patch.scale for patch in second.patches.values()] == [1.75, 1.75]
    write_diffusers(path, {"transformer.r": 4})
    assert [patch.scale for patch in read(path).patches.values()] == [1, 1]


def test_settings_of_one_half_say_nothing_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_diffusers(
        path, {"transformer.use_rslora": True, "transformer.lora_alpha": 6, "transformer_2.r": 4}
    )
    second = read_lora(read_model_file(str(path)), SHAPE, half=HALVES[1])
    assert [patch.scale for patch in second.patches.values()] == [1, 1]
    assert "use_rslora" in refusal(lambda: read(path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"transformer.lora_alpha": 4, "transformer.use_rslora": True}, "PEFT's use_rslora"),
        ({"transformer.lora_alpha": 4, "transformer.alpha_pattern": {"x": 1}}, "alpha_pattern"),
        ({"transformer.lora_alpha": "4"}, "cannot be read"),
        ({"transformer.lora_alpha": math.inf}, "cannot be read"),
        ({"transformer.lora_alpha": 10**400}, "cannot be read"),
        ([1], "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_diffusers_metadata_that_cannot_be_followed_is_refused(
    config: object, message: str, tmp_path: Path
) -> None:
    write_diffusers(tmp_path / "a.safetensors", config)
    assert message in refusal(lambda: read(tmp_path / "a.safetensors"))


def test_damaged_files_and_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(spelled(plain_lora(SHAPES, seed=1), "kohya"), path)
    assert len(read(path).patches) > 30
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in refusal(lambda: read(path))
    pickle = tmp_path / "a.pt"
    pickle.write_bytes(b"\x80\x02.")
    assert "pickled checkpoints can run code" in refusal(lambda: read(pickle))


def test_files_that_differ_in_alpha_only_have_other_digests(tmp_path: Path) -> None:
    parts = mixed_lora(SHAPES, seed=1)
    digests = set()
    for alpha in (1.0, 2.0, 1.0):
        tensors = spelled(parts, "comfyui") | {f"{Q}.alpha": torch.tensor(alpha)}
        save_file(tensors, tmp_path / "a.safetensors")
        digests.add(content_of(read_model_file(str(tmp_path / "a.safetensors"))))
    assert len(digests) == 2


@pytest.mark.parametrize("strength", [math.nan, math.inf, -100.5])
def test_strength_out_of_range_is_refused(strength: float) -> None:
    handle = ModelHandle(path="m", dtype="auto", mesh="single", devices="cpu:1", compile=False)
    with pytest.raises(ConfigError, match="must be a number from -100 to 100"):
        handle.with_lora("l", strength)
    assert handle.with_lora("l", 0.0) == handle
    both = handle.with_lora("l", -1).with_lora("l", 2)
    assert [lora.strength for lora in both.loras] == [-1, 2]


def test_expert_that_the_model_has_not_is_refused() -> None:
    handle = ModelHandle(path="m", dtype="auto", mesh="single", devices="cpu:1", compile=False)
    for expert in ("low noise", "high noise"):
        with pytest.raises(ConfigError, match=f"'{expert}', but the model has one expert; choose"):
            handle.with_lora("l", 1.0, expert)
    with pytest.raises(ConfigError, match="'third'; choose 'both', 'high noise', 'low noise'"):
        handle.with_lora("l", 1.0, "third")
    two = replace(handle, low_noise_path="n")
    assert two.with_lora("l", 1.0, "low noise").loras[0].expert == "low noise"


# ---- any keys

MODULES = st.sampled_from(
    [
        "blocks.0.self_attn.q",
        "blocks.2.ffn.0",
        "blocks.7.cross_attn.o",
        "blocks.0.modulation",
        "blocks.1.norm3",
        "head.head",
        "blocks.0.attn1.to_q",
        "proj_out",
        "blocks.0.cross_attn.k_img",
        "x",
    ]
)
BEGINNINGS = st.sampled_from(
    [
        "",
        "diffusion_model.",
        "transformer.",
        "transformer_2.",
        "diffusion_model.transformer_1.",
        "diffusion_model.transformer_2.",
        "base_model.model.",
        "lora_unet_",
        "lora_unet__",
    ]
)
ENDS = st.sampled_from(
    [
        *(f".{role.value}" for role in Role if "_w" in role.value),
        *(
            ".lora_A.weight",
            ".lora_B.weight",
            ".lora_down.weight",
            ".lora_up.weight",
            ".lora_mid.weight",
        ),
        *(
            ".lora_A.x.weight",
            ".alpha",
            ".dora_scale",
            ".diff",
            ".diff_b",
            ".set_weight",
            ".bias.diff",
            ".weight",
        ),
    ]
)
GOOD: tuple[dict[str, TensorEntry], ...] = (
    pair(Q),
    pair("lora_unet__blocks_2_ffn_0", 64, 128) | {"lora_unet__blocks_2_ffn_0.alpha": entry()},
    {"transformer.scale_shift_table.diff": entry(1, 2, 128)},
    {"lycoris_head_head.lokr_w1": entry(3, 2), "lycoris_head_head.lokr_w2": entry(64, 64)},
    {
        f"blocks.1.cross_attn.k.{role.value}": entry(
            *((128, 3) if role.value[-1] == "a" else (3, 128))
        )
        for role in Role
        if role.value.startswith("hada")
    },
)


@st.composite
def keys(draw: st.DrawFn) -> str:
    beginning, module = draw(BEGINNINGS), draw(MODULES)
    if beginning.startswith("lora_unet"):
        module = module.replace(".", "_")
    return beginning + module + draw(ENDS)


STRANGE = st.dictionaries(
    keys() | st.text(max_size=20),
    st.builds(
        lambda shape, dtype: entry(*shape, dtype=dtype),
        st.sampled_from([(128, 4), (4, 128), (128,), (), (1,), (128, 128), (0, 4), (128, 1)])
        | st.lists(st.integers(0, 200), max_size=5).map(tuple),
        st.sampled_from(["F32", "F16", "BF16", "F32", "F16", "F8_E4M3", "I64"]),
    ),
    max_size=4,
)
ENTRIES: Any = st.builds(
    lambda good, strange: {key: each for part in (*good, strange) for key, each in part.items()},
    st.lists(st.sampled_from(GOOD), max_size=3),
    STRANGE,
)


@given(entries=ENTRIES, alpha=st.floats())
def test_any_keys_are_parsed_or_listed_or_refused(
    entries: dict[str, TensorEntry], alpha: float
) -> None:
    try:
        file = parse(entries, alpha=alpha)
    except ModelFileError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 500
        return
    used = [factor.name for patch in file.patches.values() for factor in patch.factors.values()]
    assert len(set(used)) == len(used)
    assert len(set(file.unknown)) == len(file.unknown)
    assert not set(used) & set(file.unknown)
    rest = entries.keys() - {*used, *file.unknown}
    assert all(key.endswith(".alpha") for key in rest)
    assert file.patches
    for name, patch in file.patches.items():
        rows, columns = extent(patch)
        assert rows * columns == math.prod(SHAPES[name])
        assert patch.is_reshaped == (rows != SHAPES[name][0])
        assert math.isfinite(patch.scale)


@given(key=keys() | st.text())
def test_any_key_means_something_or_nothing(key: str) -> None:
    part = read_key(key)
    assert (
        part is None
        or part.parameter in SHAPES
        or part.parameter.startswith(("blocks.", "head.modulation.", "head.head."))
    )
