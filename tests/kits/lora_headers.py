"""Headers of LoRA files, without the files: a pair of factors, and every case that is refused."""

from __future__ import annotations

from comfy_wan_dist.model_file.encoding import TensorEntry

Q = "diffusion_model.blocks.0.self_attn.q"


def entry(*shape: int, dtype: str = "F32") -> TensorEntry:
    return TensorEntry(dtype=dtype, shape=shape, path="", start=0, stop=0)


def pair(module: str, rows: int = 128, columns: int = 128, rank: int = 4) -> dict[str, TensorEntry]:
    return {
        f"{module}.lora_A.weight": entry(rank, columns),
        f"{module}.lora_B.weight": entry(rows, rank),
    }


REFUSED: dict[str, tuple[dict[str, TensorEntry], str]] = {
    "nothing": ({}, "none of its 0 keys is known; choose"),
    "another model": (
        {"lora_unet_down_blocks_0_attentions_0.lora_up.weight": entry(4, 4)},
        "none of its 1 keys is known, the first is 'lora_unet_down_blocks",
    ),
    "width": (
        pair(Q, 5120, 5120),
        "is made for a model of width 5120, but this one has width 128",
    ),
    "width before blocks": (
        pair("diffusion_model.blocks.39.cross_attn.o", 5120, 5120),
        "width 5120, but this one has width 128",
    ),
    "block": (
        pair("diffusion_model.blocks.3.cross_attn.o"),
        "changes block 3, but the blocks of this model are 0 to 2",
    ),
    "size": (
        pair("diffusion_model.blocks.0.ffn.0", 65, 128),
        "changes blocks.0.ffn.0.weight by [65, 128], but this model has it in [64, 128]",
    ),
    "input": (
        pair("diffusion_model.text_embedding.0", 128, 4096),
        "changes text_embedding.0.weight by [128, 4096], but this model has it in [128, 16]",
    ),
    "difference": (
        {"diffusion_model.blocks.0.modulation.diff": entry(1, 2, 128)},
        "changes blocks.0.modulation by [1, 2, 128], but this model has it in [1, 6, 128]",
    ),
    "bias": (
        {f"{Q}.diff_b": entry(64)},
        "changes blocks.0.self_attn.q.bias by [64], but this model has it in [128]",
    ),
    "no up": ({f"{Q}.lora_A.weight": entry(4, 128)}, f"has '{Q}.lora_A.weight' without its up"),
    "no down": ({f"{Q}.lora_up.weight": entry(128, 4)}, "without its down"),
    "no half": (
        {f"{Q}.hada_w1_a": entry(128, 4), f"{Q}.hada_w1_b": entry(4, 128)},
        "has hada_w2_a nowhere",
    ),
    "no factor": ({f"{Q}.lokr_w2_a": entry(32, 4)}, "without its lokr_w2_b"),
    "no w2": ({f"{Q}.lokr_w1": entry(4, 4)}, "has lokr_w2 nowhere"),
    "w1 twice": (
        {
            f"{Q}.lokr_w1": entry(4, 4),
            f"{Q}.lokr_w1_a": entry(4, 2),
            f"{Q}.lokr_w1_b": entry(2, 4),
            f"{Q}.lokr_w2": entry(32, 32),
        },
        "has lokr_w1 twice",
    ),
    "second half": (
        {
            f"{Q}.hada_w1_a": entry(128, 4),
            f"{Q}.hada_w1_b": entry(4, 128),
            f"{Q}.hada_w2_a": entry(128, 4),
            f"{Q}.hada_w2_b": entry(4, 64),
        },
        "changes blocks.0.self_attn.q.weight by [128, 64]",
    ),
    "ranks": (
        {f"{Q}.lora_A.weight": entry(8, 128), f"{Q}.lora_B.weight": entry(128, 4)},
        "lora_B.weight' has rank 4 but 'diffusion_model.blocks.0.self_attn.q.lora_A.weight' has rank 8",
    ),
    "rank 0": (pair(Q, rank=0), "equal and not 0"),
    "vector": (
        {f"{Q}.lora_A.weight": entry(128), f"{Q}.lora_B.weight": entry(128, 1)},
        "has shape [128]; a factor must be a matrix",
    ),
    "alpha's shape": (
        pair(Q) | {f"{Q}.alpha": entry(2)},
        f"'{Q}.alpha' has shape [2]; it must be one number",
    ),
    "type": (
        {key: entry(*each.shape, dtype="I8") for key, each in pair(Q).items()},
        "as I8; this version merges F32, F16, BF16, F64, F8_E4M3, F8_E5M2",
    ),
    "two names": (
        pair(Q) | pair("transformer.blocks.0.attn1.to_q"),
        "which mean the same",
    ),
    "two ways": (
        pair(Q) | {f"{Q}.diff": entry(128, 128)},
        "changes blocks.0.self_attn.q.weight in several ways (LoRA, a difference)",
    ),
    "DoRA's shape": (
        pair(Q) | {f"{Q}.dora_scale": entry(128)},
        "has shape [128]; for a change of 128 x 128 it must be [128, 1] or [1, 128]",
    ),
    "DoRA to one length": (
        pair(Q) | {f"{Q}.dora_scale": entry(1, 1)},
        "has shape [1, 1]; for a change of 128 x 128 it must be [128, 1] or [1, 128]",
    ),
    "DoRA of columns": (
        pair("diffusion_model.patch_embedding", 128, 48 * 4)
        | {"diffusion_model.patch_embedding.dora_scale": entry(1, 192)},
        "changes patch_embedding.weight by DoRA to lengths [1, 192], but this model has it in [128, 48, 1, 2, 2]",
    ),
    "DoRA of other dims": (
        pair(Q) | {f"{Q}.dora_scale": entry(128, 1, 1)},
        "by DoRA to lengths [128, 1, 1], but this model has it in [128, 128]",
    ),
    "DoRA in another shape": (
        pair("diffusion_model.blocks.0.modulation", 6, 128)
        | {"diffusion_model.blocks.0.modulation.dora_scale": entry(6, 1)},
        "by DoRA to lengths [6, 1], but this model has it in [1, 6, 128]",
    ),
    "DoRA to one length in another shape": (
        pair("diffusion_model.blocks.0.modulation", 768, 1)
        | {"diffusion_model.blocks.0.modulation.dora_scale": entry(1, 1)},
        "by DoRA to lengths [1, 1], but this model has it in [1, 6, 128]",
    ),
    "value": (
        pair(Q) | {"diffusion_model.blocks.0.self_attn.k.set_weight": entry(128)},
        "replaces blocks.0.self_attn.k.weight by [128], but this model has it in [128, 128]",
    ),
    "complex": (
        pair(Q) | {f"{Q}.alpha": entry(dtype="C64")},
        "as C64; this version merges F32, F16, BF16, F64, F8_E4M3, F8_E5M2",
    ),
    "kernel": (
        {
            "diffusion_model.patch_embedding.lokr_w1": entry(8, 6),
            "diffusion_model.patch_embedding.lokr_w2": entry(16, 8, 1, 2, 2),
        },
        "has shape [16, 8, 1, 2, 2]; this version merges Kronecker products of matrices only",
    ),
    "shape": (pair(Q) | {f"{Q}.reshape_weight": entry(2, dtype="I64")}, "a change of shape"),
    "OFT": ({f"{Q}.oft_blocks": entry(4, 32, 32)}, "belongs to OFT or BOFT, which this version"),
    "PEFT's DoRA": (pair(Q) | {f"{Q}.lora_magnitude_vector": entry(128)}, "PEFT's form of DoRA"),
    "Tucker": (pair(Q) | {f"{Q}.lora_mid.weight": entry(4, 4, 1, 1)}, "a Tucker decomposition"),
    "GLoRA": (
        {
            f"{Q}.{name}.weight": entry(*((4, 128) if name in ("a2", "b2") else (128, 4)))
            for name in ("a1", "a2", "b1", "b2")
        },
        "belongs to GLoRA",
    ),
}
"""By name: a header, for a model of width 128 with 3 blocks, and what the sentence says of it."""
