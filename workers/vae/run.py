"""Pictures in ComfyUI's form through the VAE and back: [frames, height, width, 3], float32, 0..1."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError

from .wan22 import WanVAE


def decode_chunks_into(
    vae: WanVAE, latent: Tensor, frames: Tensor, *, device: torch.device
) -> Iterator[None]:
    """Decode latent [B, C, T, h, w] (raw VAE space) into frames [B*(4T-3), 16h, 16w, 3].

    Yields after each latent frame. Each sample goes through alone, so memory is that of one.
    Raises ConfigError for shapes that do not fit.
    """
    channels = vae.config.z_dim
    if latent.dim() != 5 or latent.shape[1] != channels:
        raise ConfigError(
            f"the latent has shape {list(latent.shape)}; this VAE decodes "
            f"[batch, {channels}, frames, height/16, width/16]"
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


def encode_frames(vae: WanVAE, frames: Tensor, *, device: torch.device) -> Tensor:
    """Encode frames [F, H, W, 3] to the raw latent [1, C, (F-1)//4+1, H/16, W/16], float32."""
    if frames.dim() != 4 or frames.shape[-1] != 3 or frames.shape[1] % 16 or frames.shape[2] % 16:
        raise ConfigError(
            f"the images have shape {list(frames.shape)}; the VAE encodes [frames, height, width, 3] with height "
            "and width that are multiples of 16"
        )
    pixels = frames.permute(3, 0, 1, 2).unsqueeze(0).to(device).mul(2).sub_(1)
    return vae.encode(pixels).float().cpu()
