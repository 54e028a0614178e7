"""What the VAEs make of pixels, and the sizes of a Wan2.2 VAE.

T latent frames stand for 4 * T - 3 pixel frames: the first latent frame is one pixel frame, each later one is four.

Source: the published Wan2.2 VAE architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TI2V_CHANNELS = 48
"""Channels of the Wan2.2 VAE's latents, which TI2V models take."""
VAE_STRIDE = 16
"""Pixels in height and width of one value of the Wan2.2 VAE's latents."""
WAN21_VAE_STRIDE = 8
"""Pixels in height and width of one value of the Wan2.1 VAE's latents."""
FRAME_STRIDE = 4
"""Pixel frames of each latent frame after the first, in both VAEs."""

PATCH = 2
"""The network's finest positions are 2 x 2 pixels."""
PATCH_DIM = 3 * PATCH**2
"""Channels of such a position: 3 colours of each pixel."""


def pixel_frames(latent_frames: int) -> int:
    """How many pixel frames the first `latent_frames` of a video stand for; 0 for none."""
    return max(0, FRAME_STRIDE * (latent_frames - 1) + 1)


def latent_frames(pixel_frames: int) -> int:
    """How many latent frames stand for the first 4k+1 of `pixel_frames`."""
    return (pixel_frames - 1) // FRAME_STRIDE + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One level of the encoder or decoder with the step to the next.

    time_factor, space_factor: 1 or 2, what the step multiplies or divides by.
    """

    in_dim: int
    out_dim: int
    res_blocks: int
    time_factor: int
    space_factor: int

    @property
    def has_resample(self) -> bool:
        return self.space_factor > 1

    @property
    def places(self) -> int:
        """Positions in a block of frames, rows and columns that the step merges or makes."""
        return self.time_factor * self.space_factor**2


@dataclass(frozen=True, slots=True, kw_only=True)
class VAEConfig:
    """Sizes of a Wan2.2 VAE; the defaults are those of the published file.

    encoder_dim, decoder_dim: channels at the finest level. dim_mult: width of each level, finest first, in multiples
    of these. encoder_res_blocks, decoder_res_blocks: residual blocks per level. temporal_levels: for each step between
    levels, finest first, whether it halves the frames.

    Raises: ValueError if the sizes do not fit each other.
    """

    z_dim: int = TI2V_CHANNELS
    encoder_dim: int = 160
    decoder_dim: int = 256
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    encoder_res_blocks: int = 2
    decoder_res_blocks: int = 3
    temporal_levels: tuple[bool, ...] = (False, True, True)

    def __post_init__(self) -> None:
        sizes = (self.z_dim, self.encoder_dim, self.decoder_dim, *self.dim_mult)
        if min(*sizes, self.encoder_res_blocks, self.decoder_res_blocks) < 1:
            raise ValueError(f"sizes must be positive, got {self}")
        if len(self.temporal_levels) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temporal_levels has {len(self.temporal_levels)} entries, but "
                f"{len(self.dim_mult)} levels have {len(self.dim_mult) - 1} steps between them"
            )
        for stage in self.encoder_stages:
            if stage.in_dim * stage.places % stage.out_dim:
                raise ValueError(f"no shortcut can be formed around an encoder stage: {stage}")
        for stage in self.decoder_stages[:-1]:
            share = stage.in_dim // stage.out_dim
            if stage.in_dim % stage.out_dim or stage.places % share:
                raise ValueError(f"no shortcut can be formed around a decoder stage: {stage}")

    @property
    def spatial_factor(self) -> int:
        """Pixel rows (and columns) per latent row."""
        return int(PATCH * 2 ** len(self.temporal_levels))

    @property
    def temporal_factor(self) -> int:
        """Pixel frames per latent frame after the first."""
        return int(2 ** sum(self.temporal_levels))

    @property
    def encoder_stages(self) -> tuple[StageConfig, ...]:
        """Stages of the encoder in order of execution."""
        dims = [self.encoder_dim * mult for mult in (1, *self.dim_mult)]
        return _stages(dims, self.temporal_levels, self.encoder_res_blocks)

    @property
    def decoder_stages(self) -> tuple[StageConfig, ...]:
        """Stages of the decoder in order of execution."""
        dims = [self.decoder_dim * mult for mult in (self.dim_mult[-1], *self.dim_mult[::-1])]
        return _stages(dims, self.temporal_levels[::-1], self.decoder_res_blocks)


def _stages(
    dims: Sequence[int], temporal: Sequence[bool], res_blocks: int
) -> tuple[StageConfig, ...]:
    resampled = [(2 if is_temporal else 1, 2) for is_temporal in temporal]
    return tuple(
        StageConfig(
            in_dim=dims[i],
            out_dim=dims[i + 1],
            res_blocks=res_blocks,
            time_factor=time_factor,
            space_factor=space_factor,
        )
        for i, (time_factor, space_factor) in enumerate([*resampled, (1, 1)])
    )
