"""Rotary position tables for a contiguous range of tokens.

128 features are 64 interleaved pairs: 22 turn with the frame, 21 with the row, 21 with the column.
Source: Wan2.2 `wan/modules/model.py` (rope_params, rope_apply).
"""

from __future__ import annotations

import torch
from torch import Tensor

from comfy_wan_dist.mesh.shape import HEAD_DIM, LatentGrid

THETA = 10000.0
AXIS_DIMS = (HEAD_DIM - 4 * (HEAD_DIM // 6), 2 * (HEAD_DIM // 6), 2 * (HEAD_DIM // 6))


def rope_table(grid: LatentGrid, start: int, stop: int, *, device: torch.device) -> Tensor:
    """Unit complex factors [stop - start, 1, 64] of the tokens with global indices start..stop-1.

    Angles are computed in float64; the table is complex64.
    """
    index = torch.arange(start, stop, dtype=torch.int64)
    positions = (
        index // grid.tokens_per_frame,
        index % grid.tokens_per_frame // grid.columns,
        index % grid.columns,
    )
    angles = []
    for position, axis_dim in zip(positions, AXIS_DIMS, strict=True):
        exponents = torch.arange(0, axis_dim, 2, dtype=torch.float64) / axis_dim
        angles.append(torch.outer(position.double(), THETA**-exponents))
    angle = torch.cat(angles, dim=-1)
    table = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    return table.unsqueeze(1).to(device)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Turn the feature pairs of x [B, L, N, K] (float32, contiguous) by table [L, 1, K/2], in place; returns x."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(table)
    return x
