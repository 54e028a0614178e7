"""The numbers of a Wan transformer that decide how it can be cut and what it costs.

Source: Wan2.2 `config.json` fields and the shapes of its tensors; head_dim is 128 in every Wan model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from ..ipc.errors import ConfigError
from .dtypes import Packing
from .vae_shape import TI2V_CHANNELS, VAE_STRIDE, WAN21_VAE_STRIDE, latent_frames

HEAD_DIM = 128
PATCH_SIZE = (1, 2, 2)
PATCH_POSITIONS = prod(PATCH_SIZE)


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
        return self.out_dim * PATCH_POSITIONS

    @property
    def modulation_dim(self) -> int:
        """Features of a block's modulation: shift, scale and gate of self-attention and of the FFN."""
        return 6 * self.dim

    @property
    def image_dim(self) -> int:
        """Input channels beside the latent's: of a mask and an image, in image-to-video models of 16 channels."""
        return self.in_dim - self.out_dim

    @property
    def conditions(self) -> tuple[ConditionKind, ...]:
        """What a prompt brings for this model beside its text."""
        image = ConditionKind(
            name="image",
            channels=self.image_dim,
            remedy="make it with WanImageToVideo for an I2V model, and leave it out for others",
        )
        return (image,)

    @property
    def has_frame_times(self) -> bool:
        """Whether each latent frame has a timestep of its own, 0 where it is given: TI2V."""
        return self.out_dim == TI2V_CHANNELS

    @property
    def vae_stride(self) -> int:
        """Pixels in height and width of one latent value: of the Wan2.2 VAE for TI2V, of the Wan2.1 VAE otherwise."""
        return VAE_STRIDE if self.out_dim == TI2V_CHANNELS else WAN21_VAE_STRIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionKind:
    """A condition that a prompt may bring beside its text.

    channels: 0 for a model that takes none. on_tokens: it is [1 or B, channels, T, h, w], cut like the latent; else
    [1 or B, S, channels], whole on every rank. remedy: what to do about one that does not fit.
    """

    name: str
    channels: int
    on_tokens: bool = True
    remedy: str = "leave it out"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentGrid:
    """The token grid of one latent. is_padded: a side is odd, and its last token is half padding."""

    frames: int
    rows: int
    columns: int
    is_padded: bool = False

    @property
    def tokens(self) -> int:
        return self.frames * self.rows * self.columns

    @property
    def tokens_per_frame(self) -> int:
        return self.rows * self.columns


def latent_grid(*, frames: int, height: int, width: int) -> LatentGrid:
    """Token grid of a latent of so many values."""
    rows, columns = (height + 1) // 2, (width + 1) // 2
    is_padded = bool(height % 2 or width % 2)
    return LatentGrid(frames=frames, rows=rows, columns=columns, is_padded=is_padded)


def video_grid(shape: WanShape, *, height: int, width: int, frames: int) -> LatentGrid:
    """Token grid of a video of so many pixels and frames, of which latents hold whole strides."""
    stride = shape.vae_stride
    if min(height, width) < stride or frames < 1:
        raise ConfigError(
            f"a video of {height}x{width} (height x width) and {frames} frames is not possible; height and width must "
            f"be {stride} or more, frames 1 or more, such as 704x1280 and 121"
        )
    return latent_grid(frames=latent_frames(frames), height=height // stride, width=width // stride)


TI2V_5B = WanShape(dim=3072, ffn_dim=14336, num_layers=30, in_dim=48, out_dim=48)
T2V_14B = WanShape(dim=5120, ffn_dim=13824, num_layers=40, in_dim=16, out_dim=16)
KNOWN_MODELS = {
    "ti2v-5b": TI2V_5B,
    "t2v-14b": T2V_14B,
    "i2v-14b": replace(T2V_14B, in_dim=36),
    "t2v-1.3b": WanShape(dim=1536, ffn_dim=8960, num_layers=30, in_dim=16, out_dim=16),
}
"""Models by the name that they have without a file."""
