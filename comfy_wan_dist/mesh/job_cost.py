"""What a job costs, to put jobs in order: FLOPs of the whole job, whatever it runs on.

Covered: the terms that grow with the video. Not covered: how a mesh cuts them, and how fast a device is.

Source: the shapes of Wan's layers; for the VAE its decoder's count for 121x704x1280, 2.0e15, per pixel.
"""

from __future__ import annotations

from .shape import LatentGrid, WanShape

TEXT_TOKENS = 512
VAE_FLOPS_PER_PIXEL = 2e7


def sample_flops(
    shape: WanShape, grid: LatentGrid, *, steps: int, branches: int, batch: int
) -> float:
    """FLOPs of denoising `batch` latents. branches: 2 with guidance, 1 without."""
    n, d = grid.tokens, shape.dim
    products = 12 * n * d * d + 4 * n * d * shape.ffn_dim  # q k v o, cross q o, FFN
    text = 4 * TEXT_TOKENS * d * d
    scores = 4 * n * (n + TEXT_TOKENS) * d
    return float(shape.num_layers * (products + text + scores) * steps * branches * batch)


def vae_flops(*, frames: int, height: int, width: int) -> float:
    """FLOPs of decoding so many pixels, about; encoding is of the same order."""
    return VAE_FLOPS_PER_PIXEL * frames * height * width
