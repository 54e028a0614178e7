"""Independent implementations with the same weights: diffusers' Wan transformer and VAE.

Names on the left of each mapping are the official ones, which this project's modules use.
diffusers is imported when a model is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy_wan_dist.mesh.shape import HEAD_DIM, WanShape
from comfy_wan_dist.mesh.vae_shape import VAEConfig

TRANSFORMER_NAMES = (
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^head\.head\.", "proj_out."),
    (r"^(blocks\.\d+)\.modulation$", r"\1.scale_shift_table"),
    (r"\.norm3\.", ".norm2."),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.(q|k|v)\.", r".to_\1."),
    (r"\.o\.", ".to_out.0."),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
)


def build_diffusers_transformer(shape: WanShape, weights: Mapping[str, Tensor]) -> Any:
    """WanTransformer3DModel of this shape holding `weights` (official names)."""
    from diffusers import WanTransformer3DModel

    reference = WanTransformer3DModel(
        num_attention_heads=shape.num_heads,
        attention_head_dim=HEAD_DIM,
        in_channels=shape.in_dim,
        out_channels=shape.out_dim,
        text_dim=shape.text_dim,
        freq_dim=shape.freq_dim,
        ffn_dim=shape.ffn_dim,
        num_layers=shape.num_layers,
        cross_attn_norm=True,
    )
    reference.load_state_dict(
        {renamed(name, TRANSFORMER_NAMES): value for name, value in weights.items()}
    )
    return reference.eval().requires_grad_(False)


def build_diffusers_vae(config: VAEConfig, weights: Mapping[str, Tensor]) -> Any:
    """AutoencoderKLWan of this configuration holding `weights` (official names)."""
    from diffusers import AutoencoderKLWan

    reference = AutoencoderKLWan(
        base_dim=config.encoder_dim,
        decoder_base_dim=config.decoder_dim,
        z_dim=config.z_dim,
        dim_mult=list(config.dim_mult),
        num_res_blocks=config.encoder_res_blocks,
        temperal_downsample=list(config.temporal_levels),
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    renamed_weights = {diffusers_vae_name(name, config): value for name, value in weights.items()}
    reference.load_state_dict(renamed_weights)
    return reference.eval().requires_grad_(False)


def diffusers_vae_name(name: str, config: VAEConfig) -> str:
    """The name in diffusers of the VAE's tensor with this official name."""
    return renamed(name, _vae_names(config))


def _vae_names(config: VAEConfig) -> tuple[tuple[str, str], ...]:
    down, up = config.encoder_res_blocks, config.decoder_res_blocks
    return (
        (rf"downsamples\.(\d+)\.downsamples\.{down}\.", r"down_blocks.\1.downsampler."),
        (r"downsamples\.(\d+)\.downsamples\.(\d+)\.", r"down_blocks.\1.resnets.\2."),
        (rf"upsamples\.(\d+)\.upsamples\.{up}\.", r"up_blocks.\1.upsampler."),
        (r"upsamples\.(\d+)\.upsamples\.(\d+)\.", r"up_blocks.\1.resnets.\2."),
        (r"^conv1\.", "quant_conv."),
        (r"^conv2\.", "post_quant_conv."),
        (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
        (r"\.head\.0\.", ".norm_out."),
        (r"\.head\.2\.", ".conv_out."),
        (r"\.middle\.1\.", ".mid_block.attentions.0."),
        (r"\.middle\.0\.", ".mid_block.resnets.0."),
        (r"\.middle\.2\.", ".mid_block.resnets.1."),
        (r"\.residual\.0\.", ".norm1."),
        (r"\.residual\.2\.", ".conv1."),
        (r"\.residual\.3\.", ".norm2."),
        (r"\.residual\.6\.", ".conv2."),
        (r"\.shortcut\.", ".conv_shortcut."),
    )


def renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
