"""LoRA files as their tools write them, small: the same names, types and dims, but few and narrow blocks.

Source: what the tools' own code writes, and the keys that people's logs name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from devtools.loras import Parts, PartsMaker, diffusers_path, spelled

Tensors = dict[str, Tensor]

# What ComfyUI tells a Wan model by has the sizes of the real ones; rows are of 256 values, as K-quants need.
SHAPE = WanShape(
    dim=256, ffn_dim=512, num_layers=2, in_dim=16, out_dim=16, text_dim=4096, freq_dim=256
)
SHAPES = expected_parameters(SHAPE)
ATTENTIONS = tuple(name for name in SHAPES if "_attn." in name and len(SHAPES[name]) == 2)
LINEARS = tuple(name for name in SHAPES if name.startswith("blocks.") and len(SHAPES[name]) == 2)
MATRICES = tuple(name for name in SHAPES if len(SHAPES[name]) == 2)
MAKE = PartsMaker(SHAPES, seed=31)


# ---- LoRA


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A file's tensors, and what they mean: for the one model, or for the first and the second expert.

    difference: how the row of docs/differences.md begins that says why it is not merged as stock merges it.
    """

    tensors: Tensors
    parts: Parts
    second: Parts | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    difference: str = ""


def pairs(
    names: Sequence[str], dtype: torch.dtype, *, alpha: Tensor | None = None
) -> dict[str, Tensors]:
    """Factors of these weights, as stored. alpha: of each."""
    beside = {} if alpha is None else {"alpha": alpha}
    return {name: stored(MAKE.low_rank(name, alpha=None), dtype) | beside for name in names}


def stored(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensors:
    return {end: tensor.to(dtype) for end, tensor in parts.items()}


def underscored(parts: Parts, begin: str, *, is_diffusers: bool = False) -> Tensors:
    """Keys of kohya's and LyCORIS' networks: a module's path with underscores."""
    return {
        f"{begin}{(diffusers_path(path) if is_diffusers else path).replace('.', '_')}.{end}": value
        for key, value in spelled(parts, "bare").items()
        for path, end in (
            split_end(key.replace("lora_A", "lora_down").replace("lora_B", "lora_up")),
        )
    }


def split_end(key: str) -> tuple[str, str]:
    """A module's path, and which of its tensors it is."""
    kept = 2 if key.endswith(".weight") else 1
    *path, last = key.rsplit(".", kept)
    return path[0], ".".join([*path[1:], last])


def begun(tensors: Tensors, old: str, new: str) -> Tensors:
    assert all(key.startswith(old) for key in tensors)
    return {new + key.removeprefix(old): value for key, value in tensors.items()}


def lightx2v_extracted() -> Lora:
    """lora_extractor.py: large matrices as pairs, all that is small as differences, modulations as diff_m."""
    parts: dict[str, Tensors] = {}
    for name in SHAPES:
        if name.endswith("bias"):
            continue
        is_pair = name in MATRICES and name != "head.head.weight"
        change = MAKE.low_rank(name, alpha=None) if is_pair else MAKE.difference(name)
        has_bias = f"{name.removesuffix('weight')}bias" in SHAPES
        parts[name] = stored(change | (MAKE.bias(name) if has_bias else {}), torch.bfloat16)
    tensors = spelled(parts, "comfyui")
    return Lora(
        tensors={key.replace("modulation.diff", "diff_m"): v for key, v in tensors.items()},
        parts=parts,
        difference="changes of a `modulation`",
    )


def lightx2v_lightning() -> Lora:
    """Wan2.2-Lightning: alpha beside each pair, as int64."""
    parts = pairs(LINEARS, torch.bfloat16, alpha=torch.tensor(8))
    return Lora(tensors=spelled(parts, "comfyui"), parts=parts)


def musubi_lora() -> Lora:
    """networks/lora_wan.py: all linears of the blocks, alpha in the type of the file."""
    parts = pairs(LINEARS, torch.bfloat16, alpha=torch.tensor(2.0, dtype=torch.bfloat16))
    metadata = {"ss_network_module": "networks.lora_wan", "ss_network_alpha": "2"}
    return Lora(tensors=underscored(parts, "lora_unet_"), parts=parts, metadata=metadata)


def musubi_converted() -> Lora:
    """convert_lora.py --target default: alpha is the rank, as the integer that it is."""
    parts = pairs(LINEARS, torch.float16, alpha=torch.tensor(4))
    return Lora(tensors=underscored(parts, "lora_unet_"), parts=parts)


def hadamards(alpha: float) -> dict[str, Tensors]:
    value = torch.tensor(alpha)
    return {
        name: stored(MAKE.hadamard(name) | {"alpha": value}, torch.bfloat16) for name in LINEARS
    }


def kroneckers(
    names: Sequence[str], dtype: torch.dtype, *, factored: bool, alpha: float | None
) -> dict[str, Tensors]:
    changes = {}
    for name in names:
        change = MAKE.kronecker(name, factored=factored)
        del change["alpha"]
        beside = {} if alpha is None else {"alpha": torch.tensor(alpha)}
        changes[name] = stored(change | beside, dtype)
    return changes


def musubi_loha() -> Lora:
    parts = hadamards(2.0)
    return Lora(tensors=underscored(parts, "lora_unet_"), parts=parts)


def musubi_lokr() -> Lora:
    """networks/lokr.py: the first factor whole, the second as a pair."""
    parts = kroneckers(LINEARS, torch.bfloat16, factored=True, alpha=2.0)
    return Lora(tensors=underscored(parts, "lora_unet_"), parts=parts)


def musubi_loha_converted() -> Lora:
    """convert_lora.py --target other."""
    parts = hadamards(3.0)
    return Lora(tensors=spelled(parts, "comfyui"), parts=parts)


def diffusion_pipe_lora() -> Lora:
    """PEFT's names without the adapter's, and without alpha, which always is the rank."""
    parts = pairs(LINEARS, torch.bfloat16)
    return Lora(tensors=spelled(parts, "comfyui, A and B"), parts=parts, metadata={"format": "pt"})


def diffusion_pipe_lokr() -> Lora:
    """PEFT's LoKr; its alpha is in no file."""
    parts = kroneckers(LINEARS, torch.bfloat16, factored=True, alpha=None)
    return Lora(tensors=spelled(parts, "comfyui"), parts=parts, metadata={"format": "pt"})


def ai_toolkit_image() -> Lora:
    """Trained on Wan2.1 image-to-video, which has projections for images beside ours."""
    parts = pairs(LINEARS, torch.float16)
    images = {
        f"blocks.{block}.cross_attn.{name}.weight": {
            "up": torch.randn(256, 4).half(),
            "down": torch.randn(4, 256).half(),
        }
        for block in range(2)
        for name in ("k_img", "v_img")
    }
    return Lora(tensors=spelled({**parts, **images}, "comfyui, A and B"), parts=parts)


def ai_toolkit_experts() -> Lora:
    """wan22_14b_model.py without split_multistage_loras: both experts in one file."""
    first, second = pairs(LINEARS, torch.float16), pairs(LINEARS, torch.float16)
    tensors: Tensors = {}
    for number, parts in ((1, first), (2, second)):
        tensors |= begun(
            spelled(parts, "comfyui, A and B"),
            "diffusion_model.",
            f"diffusion_model.transformer_{number}.",
        )
    return Lora(tensors=tensors, parts=first, second=second, difference="halves `transformer.`")


def ai_toolkit_lokr() -> Lora:
    """lokr_full_rank: both factors whole, and an alpha of 9999999999, infinite in float16."""
    parts = kroneckers(LINEARS, torch.float16, factored=False, alpha=9999999999.0)
    return Lora(tensors=spelled(parts, "comfyui"), parts=parts)


def ai_toolkit_old_lokr() -> Lora:
    """old_lokr_format: diffusers' paths with underscores, of which only those without dots became official."""
    parts = kroneckers(LINEARS, torch.float16, factored=True, alpha=4.0)
    tensors = underscored(parts, "lycoris_", is_diffusers=True)
    for old, new in (
        ("attn1", "self_attn"),
        ("attn2", "cross_attn"),
        ("to_q", "q"),
        ("to_k", "k"),
        ("to_v", "v"),
    ):
        tensors = {key.replace(old, new): value for key, value in tensors.items()}
    assert "lycoris_blocks_0_self_attn_to_out_0.lokr_w1" in tensors
    return Lora(tensors=tensors, parts=parts, difference="keys of diffusers")


def peft_settings(**alphas: float) -> dict[str, str]:
    settings: dict[str, float] = {}
    for component, alpha in alphas.items():
        settings |= {f"{component}.r": 4, f"{component}.lora_alpha": alpha}
    return {"format": "pt", "lora_adapter_metadata": json.dumps(settings)}


def with_alpha(parts: Parts, alpha: float) -> dict[str, Tensors]:
    return {name: {**change, "alpha": torch.tensor(float(alpha))} for name, change in parts.items()}


def simpletuner_peft() -> Lora:
    """diffusers' form: attention only, alpha in the metadata."""
    parts = pairs(ATTENTIONS, torch.bfloat16)
    return Lora(
        tensors=spelled(parts, "diffusers"),
        parts=with_alpha(parts, 8),
        metadata=peft_settings(transformer=8),
        difference="keys of diffusers",
    )


def simpletuner_comfyui() -> Lora:
    """lora_format comfyui: ComfyUI's prefix before diffusers' paths, alpha as a tensor and in the metadata."""
    parts = with_alpha(pairs(ATTENTIONS, torch.bfloat16), 8)
    return Lora(
        tensors=begun(spelled(parts, "diffusers"), "transformer.", "diffusion_model."),
        parts=parts,
        metadata={"format": "pt", "lora_adapter_metadata": json.dumps({"r": 4, "lora_alpha": 8})},
        difference="keys of diffusers",
    )


def simpletuner_lokr() -> Lora:
    parts = kroneckers(ATTENTIONS, torch.bfloat16, factored=False, alpha=1.0)
    return Lora(
        tensors=underscored(parts, "lycoris_", is_diffusers=True),
        parts=parts,
        metadata={"lycoris_config": json.dumps({"algo": "lokr"})},
        difference="keys of diffusers",
    )


def simpletuner_extracted() -> Lora:
    """extract_lycoris_adapter.py: pairs under LyCORIS' names."""
    parts = pairs(ATTENTIONS, torch.float16, alpha=torch.tensor(4.0, dtype=torch.float16))
    return Lora(
        tensors=underscored(parts, "lycoris_", is_diffusers=True),
        parts=parts,
        metadata={"format": "simpletuner-lycoris-extract"},
        difference="keys of diffusers",
    )


def kohya_resized() -> Lora:
    """resize_lora.py --dynamic_method: a rank and an alpha of its own for each matrix."""
    parts = {}
    for index, name in enumerate(LINEARS):
        rank = 1 + index % 7
        change = MAKE.low_rank(name, alpha=None)
        up, down = change["up"].repeat(1, 2), change["down"].repeat(2, 1)
        change = {"up": up[:, :rank], "down": down[:rank], "alpha": torch.tensor(rank / 2)}
        parts[name] = stored(change, torch.float16)
    metadata = {"ss_network_dim": "Dynamic", "ss_network_alpha": "Dynamic"}
    return Lora(tensors=underscored(parts, "lora_unet_"), parts=parts, metadata=metadata)


def kohya_dora() -> Lora:
    """lycoris.kohya with dora_wd: the length of each row of the changed weight."""
    parts = {name: stored(MAKE.dora(name, by_rows=True), torch.float16) for name in LINEARS}
    metadata = {"ss_network_module": "lycoris.kohya"}
    return Lora(tensors=underscored(parts, "lora_unet_"), parts=parts, metadata=metadata)


def kohya_full() -> Lora:
    """lycoris.kohya, algorithm full with train_norm: differences of matrices, biases and norms."""
    parts = {
        name: stored(MAKE.difference(name) | MAKE.bias(name), torch.float16) for name in LINEARS
    }
    tensors = underscored(parts, "lora_unet_")
    for block in range(SHAPE.num_layers):
        name = f"blocks.{block}.norm3.weight"
        parts[name] = stored(MAKE.difference(name) | MAKE.bias(name), torch.float16)
        tensors[f"lora_unet_blocks_{block}_norm3.w_norm"] = parts[name]["diff"]
        tensors[f"lora_unet_blocks_{block}_norm3.b_norm"] = parts[name]["bias"]
    return Lora(tensors=tensors, parts=parts)


def kijai_distilled() -> Lora:
    """Wan21_I2V_14B_lightx2v_cfg_step_distill: pairs, biases and norms, those for images among them."""
    parts: dict[str, Tensors] = {}
    for name in LINEARS:
        parts[name] = stored(MAKE.low_rank(name, alpha=None) | MAKE.bias(name), torch.float16)
    for name in SHAPES:
        if name.endswith(("norm_q.weight", "norm_k.weight")):
            parts[name] = stored(MAKE.difference(name), torch.float16)
    tensors = spelled(parts, "comfyui")
    for block in range(SHAPE.num_layers):
        begin = f"diffusion_model.blocks.{block}.cross_attn."
        for name in ("k_img", "v_img"):
            tensors[f"{begin}{name}.lora_up.weight"] = torch.randn(256, 4).half()
            tensors[f"{begin}{name}.lora_down.weight"] = torch.randn(4, 256).half()
            tensors[f"{begin}{name}.diff_b"] = torch.randn(256).half()
        tensors[f"{begin}norm_k_img.diff"] = torch.randn(256).half()
    return Lora(tensors=tensors, parts=parts)


def diffusers_experts() -> Lora:
    """save_lora_weights with transformer_2: both experts in one file, each with its alpha in the metadata."""
    first, second = pairs(ATTENTIONS, torch.float32), pairs(ATTENTIONS, torch.float32)
    return Lora(
        tensors=spelled(first, "diffusers") | spelled(second, "diffusers, one expert"),
        parts=with_alpha(first, 8),
        second=with_alpha(second, 2),
        metadata=peft_settings(transformer=8, transformer_2=2),
        difference="halves `transformer.`",
    )


LORAS: dict[tuple[str, str], Callable[[], Lora]] = {
    ("LightX2V", "LoRA, extracted"): lightx2v_extracted,
    ("LightX2V", "LoRA, Lightning"): lightx2v_lightning,
    ("musubi-tuner", "LoRA"): musubi_lora,
    ("musubi-tuner", "LoRA, converted to default"): musubi_converted,
    ("musubi-tuner", "LoHa"): musubi_loha,
    ("musubi-tuner", "LoKr"): musubi_lokr,
    ("musubi-tuner", "LoHa, converted to other"): musubi_loha_converted,
    ("diffusion-pipe", "LoRA"): diffusion_pipe_lora,
    ("diffusion-pipe", "LoKr"): diffusion_pipe_lokr,
    ("ai-toolkit", "LoRA of Wan2.1 image-to-video"): ai_toolkit_image,
    ("ai-toolkit", "LoRA of two experts"): ai_toolkit_experts,
    ("ai-toolkit", "LoKr"): ai_toolkit_lokr,
    ("ai-toolkit", "LoKr, older form"): ai_toolkit_old_lokr,
    ("SimpleTuner", "LoRA"): simpletuner_peft,
    ("SimpleTuner", "LoRA for ComfyUI"): simpletuner_comfyui,
    ("SimpleTuner", "LyCORIS LoKr"): simpletuner_lokr,
    ("SimpleTuner", "LyCORIS LoRA, extracted"): simpletuner_extracted,
    ("kohya", "LoRA, resized"): kohya_resized,
    ("kohya", "LyCORIS LoRA with DoRA"): kohya_dora,
    ("kohya", "LyCORIS full and norms"): kohya_full,
    ("Kijai", "LoRA, distilled image-to-video"): kijai_distilled,
    ("diffusers", "LoRA of two experts"): diffusers_experts,
}
