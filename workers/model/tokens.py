"""Latents as tokens and back, and the runs of tokens that share a timestep.

Token features are (row, column, channel), the order of the head's output, in both directions.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from comfy_wan_dist.mesh.shape import LatentGrid

from .wan import TokenRun


def grid_of(latent: Tensor) -> LatentGrid:
    """Token grid of a latent [B, C, T, h, w] with even h and w."""
    return LatentGrid(
        frames=latent.shape[2], rows=latent.shape[3] // 2, columns=latent.shape[4] // 2
    )


def patchify(latent_BCTHW: Tensor) -> Tensor:
    """[B, C, T, h, w] -> [B, T*(h/2)*(w/2), 4*C]."""
    return rearrange(latent_BCTHW, "b c t (h p) (w q) -> b (t h w) (p q c)", p=2, q=2)


def unpatchify(tokens_BLP: Tensor, grid: LatentGrid) -> Tensor:
    """Inverse of `patchify`."""
    return rearrange(
        tokens_BLP,
        "b (t h w) (p q c) -> b c t (h p) (w q)",
        t=grid.frames,
        h=grid.rows,
        w=grid.columns,
        p=2,
        q=2,
    )


def token_runs(
    frame_rows: tuple[int, ...], grid: LatentGrid, start: int, stop: int
) -> tuple[TokenRun, ...]:
    """Runs of the shard start..stop-1, given the timestep row of every frame.

    Neighbouring frames of one row join into one run; a shard may start and end inside a frame.
    """
    runs: list[TokenRun] = []
    for frame, row in enumerate(frame_rows):
        first = max(frame * grid.tokens_per_frame, start) - start
        last = min((frame + 1) * grid.tokens_per_frame, stop) - start
        if first >= last:
            continue
        if runs and runs[-1].row == row:
            runs[-1] = TokenRun(start=runs[-1].start, stop=last, row=row)
        else:
            runs.append(TokenRun(start=first, stop=last, row=row))
    return tuple(runs)
