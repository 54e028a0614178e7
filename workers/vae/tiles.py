"""One tile of the frames after another, exactly: for memory that does not hold the whole.

Only the middle of the networks, at the coarsest level, sees whole frames, and it takes little memory; so it is done for
all frames of the video at a time. Everywhere else a position depends on its surroundings only. Each tile goes through
the levels with as much around it as its convolutions reach; what they get wrong at the tile's inner borders is cut off
between levels. A tile has its own history of frames, so the video is done tile by tile, all its frames in each.

The same numbers come out as without tiles. What lies around a tile is computed again for each.

Shape suffixes as in layers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from comfy_wan_dist.mesh.vae_shape import PATCH, VAEConfig

from .layers import FrameHistory
from .wan22 import WanVAE, as_pictures, patchify


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a device goes over its part of frames that are cut along `dim` (of BTHWC), in latent positions.

    length: of the whole frame. part: the device's own positions. tiles: those of each tile; the last tiles may be
    empty. widen: adds to the part of the decoder's middle what the tiles need beyond it. held: positions then.
    """

    dim: int
    length: int
    part: range
    held: range
    tiles: tuple[range, ...]
    widen: Callable[[Tensor], Tensor]

    @staticmethod
    def of_nothing(tiles: int) -> Tiling:
        """The tiling of a device that has no part, but keeps step with those that have one."""
        nothing = range(0)
        return Tiling(
            dim=2,
            length=0,
            part=nothing,
            held=nothing,
            tiles=(nothing,) * tiles,
            widen=lambda x: x,
        )


def decode_reach(config: VAEConfig) -> tuple[int, ...]:
    """How many positions around a tile each level of the decoder needs, in its own positions, the coarsest first."""
    reach, levels = 1, []  # the last convolution
    for stage in reversed(config.decoder_stages):
        if stage.has_resample:
            reach = (reach + 1 + 1) // 2  # the convolution on doubled positions, halved upwards
        reach += 2 * stage.res_blocks
        levels.append(reach)
    return tuple(reversed(levels))


def encode_reach(config: VAEConfig) -> tuple[int, ...]:
    """How many positions around a tile each level of the encoder needs, in its own positions, the finest first.

    All are even, so that halving meets the same pairs.
    """
    reach, levels = 0, []
    for stage in reversed(config.encoder_stages):
        if stage.has_resample:
            reach = 2 * reach + 2  # one more is read behind the last pair
        reach += 2 * stage.res_blocks
        levels.append(reach)
    levels[-1] += 2  # the first convolution, and one for the pairs
    return tuple(reversed(levels))


def around(tile: range, reach: int, length: int) -> range:
    """The tile and `reach` positions on both sides, as far as the frame goes."""
    return range(max(0, tile.start - reach), min(length, tile.stop + reach))


def decode_tile(
    vae: WanVAE, x_bthwc: Tensor, tile: range, tiling: Tiling, history: FrameHistory
) -> Tensor:
    """Pixels in [-1, 1] of one tile, as `decode_chunk` gives them, from the middle's output of the next latent frames.

    x spans `tiling.held` along `tiling.dim`.
    """
    decoder, dim = vae.decoder, tiling.dim
    has, scale = tiling.held, 1
    levels = zip(
        decoder.upsamples, vae.config.decoder_stages, decode_reach(vae.config), strict=True
    )
    for stage, level, reach in levels:
        wanted = around(scaled(tile, scale), reach, tiling.length * scale)
        x_bthwc = x_bthwc.narrow(dim, wanted.start - has.start, len(wanted))
        x_bthwc = stage(x_bthwc, history)
        scale *= level.space_factor
        has = scaled(wanted, level.space_factor)
    own = scaled(tile, scale)
    x_bthwc = decoder.leave(x_bthwc, history).narrow(dim, own.start - has.start, len(own))
    return as_pictures(x_bthwc)


def encode_window(vae: WanVAE, tile: range, tiling: Tiling) -> range:
    """Pixel rows or columns that `encode_tile` needs."""
    return scaled(_finest_window(vae, tile, tiling), PATCH)


def encode_tile(
    vae: WanVAE, pixels_bcfhw: Tensor, tile: range, tiling: Tiling, history: FrameHistory
) -> Tensor:
    """What the encoder's middle takes of one tile, [B, T, h, w, C], from the next pixel frames in [-1, 1].

    The pixels span `encode_window` along the tiled axis.
    """
    encoder, dim = vae.encoder, tiling.dim
    has, scale = _finest_window(vae, tile, tiling), vae.config.spatial_factor // PATCH
    x_bthwc = encoder.conv1(patchify(pixels_bcfhw.to(vae.dtype)), history)
    levels = zip(
        encoder.downsamples, vae.config.encoder_stages, encode_reach(vae.config), strict=True
    )
    for stage, level, reach in levels:
        wanted = around(scaled(tile, scale), reach, tiling.length * scale)
        x_bthwc = x_bthwc.narrow(dim, wanted.start - has.start, len(wanted))
        x_bthwc = stage(x_bthwc, history)
        scale //= level.space_factor
        has = range(wanted.start // level.space_factor, wanted.stop // level.space_factor)
    return x_bthwc.narrow(dim, tile.start - has.start, len(tile))


def _finest_window(vae: WanVAE, tile: range, tiling: Tiling) -> range:
    scale = vae.config.spatial_factor // PATCH
    return around(scaled(tile, scale), encode_reach(vae.config)[0], tiling.length * scale)


def scaled(positions: range, factor: int) -> range:
    return range(positions.start * factor, positions.stop * factor)
