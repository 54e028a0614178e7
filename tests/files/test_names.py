"""Names of a transformer's tensors: which naming a file has, and what the official names are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.names import (
    PREFIXES,
    Naming,
    find_naming,
    official_path,
    official_tensors,
)
from devtools.references import TRANSFORMER_NAMES, renamed

SHAPE = WanShape(dim=128, ffn_dim=64, num_layers=12, in_dim=48, out_dim=48, text_dim=16, freq_dim=8)
OFFICIAL = tuple(expected_parameters(SHAPE))
DIFFUSERS = tuple(renamed(name, TRANSFORMER_NAMES) for name in OFFICIAL)


def transformer_of_diffusers(**options: int) -> WanTransformer3DModel:
    with init_empty_weights():
        return WanTransformer3DModel(
            num_attention_heads=SHAPE.num_heads,
            in_channels=48,
            out_channels=48,
            text_dim=SHAPE.text_dim,
            freq_dim=SHAPE.freq_dim,
            ffn_dim=SHAPE.ffn_dim,
            num_layers=SHAPE.num_layers,
            **options,
        )


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("names", [OFFICIAL, DIFFUSERS], ids=["official", "diffusers"])
def test_naming_is_found_behind_each_prefix(prefix: str, names: tuple[str, ...]) -> None:
    tensors = {prefix + name: official for name, official in zip(names, OFFICIAL, strict=True)}
    naming = find_naming(tensors)
    assert naming == Naming(prefix=prefix, is_diffusers=names is DIFFUSERS)
    # The norms differ only by their names, so each is compared with what it stands for.
    found = official_tensors(tensors, naming, label="x")
    assert found == {name: name for name in OFFICIAL}


def test_every_tensor_of_diffusers_own_model_has_an_official_name() -> None:
    state = transformer_of_diffusers().state_dict()
    naming = find_naming(state)
    assert naming == Naming(prefix="", is_diffusers=True)
    found = official_tensors(state, naming, label="x")
    assert {name: tuple(value.shape) for name, value in found.items()} == expected_parameters(SHAPE)


def test_image_branch_of_diffusers_own_model_has_official_names() -> None:
    plain = set(transformer_of_diffusers().state_dict())
    state = transformer_of_diffusers(image_dim=64, added_kv_proj_dim=128).state_dict()
    naming = find_naming(state)
    assert naming is not None
    extra = {naming.official(name) for name in state.keys() - plain}
    leaves = ("weight", "bias")
    assert extra == {f"img_emb.proj.{i}.{leaf}" for i in (0, 1, 3, 4) for leaf in leaves} | {
        f"blocks.{i}.cross_attn.{part}"
        for i in range(SHAPE.num_layers)
        for part in (
            "norm_k_img.weight",
            *(f"{name}_img.{leaf}" for name in "kv" for leaf in leaves),
        )
    }


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("blocks.11.attn1.to_q", "blocks.11.self_attn.q"),
        ("blocks.0.attn2.to_out.0", "blocks.0.cross_attn.o"),
        ("blocks.0.ffn.net.0.proj", "blocks.0.ffn.0"),
        ("blocks.0.norm2", "blocks.0.norm3"),
        ("blocks.0.scale_shift_table", "blocks.0.modulation"),
        ("scale_shift_table", "head.modulation"),
        ("proj_out", "head.head"),
        ("patch_embedding", "patch_embedding"),
        ("blocks.0.norm3", None),
        ("blocks.0.self_attn.q", None),
        ("blocks.x.attn1.to_q", None),
        ("blocks.0.attn1.to_q.lora_A", None),
        ("transformer.blocks.0.attn1.to_q", None),
        ("", None),
    ],
)
def test_path_of_diffusers(theirs: str, ours: str | None) -> None:
    assert official_path(theirs) == ours


@pytest.mark.parametrize(
    "leaf", ["scale_weight", "weight_scale", "scale_input", "input_scale", "comfy_quant"]
)
def test_companions_of_a_weight_go_with_its_module(leaf: str) -> None:
    diffusers = Naming(prefix="model.", is_diffusers=True)
    assert (
        diffusers.official(f"model.blocks.0.attn2.to_v.{leaf}") == f"blocks.0.cross_attn.v.{leaf}"
    )
    assert diffusers.official("model.blocks.0.attn2.to_v") == "blocks.0.cross_attn.v"
    official = Naming(prefix="net.", is_diffusers=False)
    assert official.official(f"net.blocks.0.ffn.2.{leaf}") == f"blocks.0.ffn.2.{leaf}"
    assert official.official("net.scaled_fp8") == "scaled_fp8"
    assert official.official("scaled_fp8") is None


def test_tensors_of_a_module_that_is_not_known_keep_their_names() -> None:
    assert (
        Naming(prefix="", is_diffusers=True).official("vace_blocks.0.x.weight")
        == "vace_blocks.0.x.weight"
    )


@pytest.mark.parametrize(
    "names",
    [
        [],
        OFFICIAL[:5],
        [f"encoder.block.{i}.layer.0.SelfAttention.q.weight" for i in range(9)],
        [f"diffusion_model.{name.removesuffix('.weight')}.lora_A.weight" for name in OFFICIAL],
        [f"first_stage_model.{name}" for name in OFFICIAL],
    ],
)
def test_names_of_something_else_have_no_naming(names: list[str]) -> None:
    assert find_naming(names) is None


def test_what_has_more_of_the_names_is_the_transformer() -> None:
    naming = find_naming([*OFFICIAL[:20], *(f"model.diffusion_model.{name}" for name in OFFICIAL)])
    assert naming == Naming(prefix="model.diffusion_model.", is_diffusers=False)


@pytest.mark.parametrize(
    "rename", [lambda name: name, lambda name: renamed(name, TRANSFORMER_NAMES)]
)
def test_tensor_under_two_names_is_refused(rename: Callable[[str], str]) -> None:
    tensors = {rename(name): torch.Size() for name in OFFICIAL}
    naming = Naming(prefix="", is_diffusers=True)
    tensors |= {"proj_out.weight": torch.Size(), "head.head.weight": torch.Size()}
    with pytest.raises(
        ModelFileError, match=r"x holds the tensor 'head\.head\.weight' under two names"
    ):
        official_tensors(tensors, naming, label="x")
