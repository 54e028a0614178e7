"""Pictures in ComfyUI's form through the VAE and back: [frames, height, width, 3], float32, 0..1.

Both directions are iterators that yield after each latent frame, so that a caller can report and stop in between.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError

from .wan22 import WanVAE

SPATIAL, TEMPORAL = 16, 4


def validate_decode(latent: Tensor, frames: Tensor) -> None:
    """Refuse a latent that is not [B, C, T, h, w] or does not give `frames` [B*(4T-3), 16h, 16w, 3]."""
    if latent.dim() != 5 or 0 in latent.shape:
        raise ConfigError(
            f"the latent has shape {list(latent.shape)}; a VAE decodes [batch, channels, frames, height, width]"
        )
    batch, _, count, height, width = latent.shape
    expected = (batch * (TEMPORAL * (count - 1) + 1), SPATIAL * height, SPATIAL * width, 3)
    if tuple(frames.shape) != expected:
        raise ConfigError(
            f"room for frames of shape {list(frames.shape)} was given; this latent decodes to {list(expected)}"
        )


def validate_encode(frames: Tensor, latent: Tensor) -> None:
    """Refuse frames that are not [4k+1, 16h, 16w, 3] or do not give `latent` [1, C, k+1, h, w]."""
    if (
        frames.dim() != 4
        or frames.shape[-1] != 3
        or 0 in frames.shape
        or frames.shape[0] % TEMPORAL != 1
        or frames.shape[1] % SPATIAL
        or frames.shape[2] % SPATIAL
    ):
        raise ConfigError(
            f"the images have shape {list(frames.shape)}; the VAE encodes [frames, height, width, 3] with 4k+1 frames "
            f"and height and width that are multiples of {SPATIAL}"
        )
    count, height, width = frames.shape[0], frames.shape[1], frames.shape[2]
    expected = ((count - 1) // TEMPORAL + 1, height // SPATIAL, width // SPATIAL)
    if latent.dim() != 5 or latent.shape[0] != 1 or tuple(latent.shape[2:]) != expected:
        raise ConfigError(
            f"room for a latent of shape {list(latent.shape)} was given; these images encode to "
            f"[1, channels, {', '.join(map(str, expected))}]"
        )


def decode_chunks_into(
    vae: WanVAE, latent: Tensor, frames: Tensor, *, device: torch.device
) -> Iterator[None]:
    """Decode latent [B, C, T, h, w] (raw VAE space) into frames, as `validate_decode` has them.

    Each sample goes through alone, so memory is that of one. Raises ConfigError for channels that do not fit.
    """
    if latent.shape[1] != vae.config.z_dim:
        raise ConfigError(
            f"the latent has {latent.shape[1]} channels; this VAE decodes {vae.config.z_dim}"
        )
    if not bool(torch.isfinite(latent).all()):
        raise ConfigError(
            "the latent holds NaN or infinite values; sample it again with dtype bfloat16 or float32"
        )
    position = 0
    for sample in latent:
        for chunk in vae.decode_chunks(sample.unsqueeze(0).to(device)):
            pictures = chunk[0].permute(1, 2, 3, 0)
            count = pictures.shape[0]
            frames[position : position + count] = pictures.float().add_(1).div_(2)
            position += count
            yield


def encode_chunks_into(
    vae: WanVAE, frames: Tensor, latent: Tensor, *, device: torch.device
) -> Iterator[None]:
    """Encode frames to the raw latent, as `validate_encode` has them.

    Raises ConfigError for channels that do not fit.
    """
    if latent.shape[1] != vae.config.z_dim:
        raise ConfigError(
            f"a latent of {latent.shape[1]} channels was asked for; this VAE encodes {vae.config.z_dim}"
        )
    pixels = frames.permute(3, 0, 1, 2).unsqueeze(0).to(device).mul(2).sub_(1)
    for index, chunk in enumerate(vae.encode_chunks(pixels)):
        latent[:, :, index] = chunk[:, :, 0]
        yield
