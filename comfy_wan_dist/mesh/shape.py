"""The numbers of a Wan transformer that decide how it can be cut and what it costs.

Source: Wan2.2 `config.json` fields and the shapes of its tensors; head_dim is 128 in every Wan model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ipc.errors import ConfigError
from .packing import Packing

HEAD_DIM = 128
PATCH_SIZE = (1, 2, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class WanShape:
    """Sizes of a Wan transformer; the names are those of its official configuration.

    packed: weights that stay in memory as a quantised file has them, by their parameter's name.
    """

    dim: int
    ffn_dim: int
    num_layers: int
    in_dim: int
    out_dim: int
    text_dim: int = 4096
    freq_dim: int = 256
    packed: tuple[tuple[str, Packing], ...] = field(default=(), repr=False)

    @property
    def num_heads(self) -> int:
        return self.dim // HEAD_DIM

    @property
    def token_dim(self) -> int:
        """Features of one output token: a 1x2x2 patch of out_dim channels."""
        pt, ph, pw = PATCH_SIZE
        return self.out_dim * pt * ph * pw


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentGrid:
    """The token grid of one latent of shape [*, frames, 2*rows, 2*columns]."""

    frames: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.frames * self.rows * self.columns

    @property
    def tokens_per_frame(self) -> int:
        return self.rows * self.columns


def video_grid(*, height: int, width: int, frames: int) -> LatentGrid:
    """Token grid of a video of so many pixels and frames: 16 pixels and 4 frames are one latent value."""
    if min(height, width, frames) < 1 or height % 32 or width % 32 or frames % 4 != 1:
        raise ConfigError(
            f"a video of {height}x{width} (height x width) and {frames} frames is not possible; height and width must "
            "be multiples of 32, frames a multiple of 4 plus 1, such as 704x1280 and 121"
        )
    return LatentGrid(frames=(frames + 3) // 4, rows=height // 32, columns=width // 32)


TI2V_5B = WanShape(dim=3072, ffn_dim=14336, num_layers=30, in_dim=48, out_dim=48)
KNOWN_MODELS = {"ti2v-5b": TI2V_5B}
"""Models by the name that they have without a file."""
