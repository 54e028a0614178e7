"""Latents as tokens and back, the tokens' positions, and the runs of tokens that share a timestep.

Token features are (row, column, channel), the order of the head's output, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from comfy_wan_dist.mesh.shape import HEAD_DIM, LatentGrid, latent_grid

from .wan import TokenRun

THETA = 10000.0
AXIS_DIMS = (HEAD_DIM - 4 * (HEAD_DIM // 6), 2 * (HEAD_DIM // 6), 2 * (HEAD_DIM // 6))
"""How many of a head's features, which are interleaved pairs, turn with the frame, the row and the column."""


def grid_of(latent: Tensor) -> LatentGrid:
    """Token grid of a latent [B, C, T, h, w]."""
    _, _, frames, height, width = latent.shape
    return latent_grid(frames=frames, height=height, width=width)


def patchify(latent_BCTHW: Tensor) -> Tensor:
    """[B, C, T, h, w] -> [B, T*(h/2)*(w/2), 4*C]. An odd side is padded with its first values, as ComfyUI does."""
    height, width = latent_BCTHW.shape[3:]
    if height % 2 or width % 2:
        latent_BCTHW = F.pad(latent_BCTHW, (0, width % 2, 0, height % 2, 0, 0), mode="circular")
    # Channels last first: torch transposes a matrix by blocks, and so takes half the time for both copies.
    channels_last = latent_BCTHW.new_empty(latent_BCTHW.movedim(1, -1).shape)
    for sample, own in zip(latent_BCTHW, channels_last, strict=True):
        own.flatten(end_dim=-2).copy_(sample.flatten(1).t())
    return rearrange(channels_last, "b t (h p) (w q) c -> b (t h w) (p q c)", p=2, q=2)


def unpatchify(tokens_BLP: Tensor, grid: LatentGrid) -> Tensor:
    """Inverse of `patchify`, padding included."""
    return rearrange(
        tokens_BLP,
        "b (t h w) (p q c) -> b c t (h p) (w q)",
        t=grid.frames,
        h=grid.rows,
        w=grid.columns,
        p=2,
        q=2,
    )


def write_tokens(tokens_BLP: Tensor, grid: LatentGrid, start: int, latent_BCTHW: Tensor) -> None:
    """Write tokens start..start+L-1 of a grid to their places in a latent, without its padding."""
    channels = latent_BCTHW.shape[1]
    for tokens, latent in zip(tokens_BLP, latent_BCTHW, strict=True):
        for box in token_boxes(grid, start, start + tokens.shape[0]):
            own, tokens = tokens.split([box.tokens, tokens.shape[0] - box.tokens])
            for frame, part in zip(box.frames, own.chunk(len(box.frames)), strict=True):
                place = latent[:, frame, _twice(box.rows), _twice(box.columns)]
                # Frame by frame and with channels last between, both copies find what they read in the cache.
                pixels = part.view(len(box.rows), len(box.columns), 2, 2, channels).transpose(1, 2)
                pixels = pixels.reshape(2 * len(box.rows), 2 * len(box.columns), channels)
                place.copy_(pixels[: place.shape[1], : place.shape[2]].movedim(-1, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBox:
    """Tokens that follow one another and fill a box of the grid."""

    frames: range
    rows: range
    columns: range

    @property
    def tokens(self) -> int:
        return len(self.frames) * len(self.rows) * len(self.columns)


def token_boxes(grid: LatentGrid, start: int, stop: int) -> Iterator[TokenBox]:
    """The boxes, in order, that tokens start..stop-1 fill: at most five."""
    while start < stop:
        count, per_frame = stop - start, grid.tokens_per_frame
        frame, place = divmod(start, per_frame)
        row, column = divmod(place, grid.columns)
        frames, rows, columns = 1, 1, min(count, grid.columns - column)
        if column == 0 and count >= grid.columns:
            rows = min(count // grid.columns, grid.rows - row)
        if place == 0 and count >= per_frame:
            frames = count // per_frame
        box = TokenBox(
            frames=range(frame, frame + frames),
            rows=range(row, row + rows),
            columns=range(column, column + columns),
        )
        yield box
        start += box.tokens


def _twice(places: range) -> slice:
    """Of rows or columns of tokens those of the latent."""
    return slice(2 * places.start, 2 * places.stop)


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


def rope_table(grid: LatentGrid, start: int, stop: int, *, device: torch.device) -> Tensor:
    """Unit complex factors [stop - start, 1, 64] of the tokens with global indices start..stop-1.

    Angles are computed in float64; the table is complex64. Source: Wan2.2 `wan/modules/model.py` (rope_params).
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
