"""The memory that the VAE takes on a rank for a video, and the choice of a split that keeps to a limit.

Covered: the tensors that are alive at once, the VAE's weights left out. Not covered: what a library needs inside of a
convolution, rows received from neighbours, and fragments: so a job takes somewhat more than is said here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from ..ipc.errors import ConfigError, InsufficientMemoryError
from .devices import GIB
from .vae_shape import VAE_STRIDE
from .vae_split import RUN, LatentSize, VAESplit, fastest_split, possible_splits


@dataclass(frozen=True, kw_only=True, slots=True)
class Appetite:
    """Tensor elements alive at once, for each latent row, column and channel of the finest level.

    held: for all frames that convolutions look back on. per_frame: for each latent frame that goes through at once.
    beyond: latent rows or columns by which a tile is wider in effect, since it needs more on both sides.
    kept_frame: for each latent frame of the video, of what is kept between the tiles and the whole frames.
    kept_beyond: latent rows or columns by which that reaches beyond the rank's part.
    """

    held: int
    per_frame: int
    beyond: float
    kept_frame: int
    kept_beyond: int


class Direction(enum.Enum):
    """What decoding and encoding take, as measured; a test measures it again."""

    DECODE = Appetite(held=2300, per_frame=1545, beyond=3.6, kept_frame=4, kept_beyond=26)
    ENCODE = Appetite(held=1212, per_frame=1424, beyond=15.2, kept_frame=4, kept_beyond=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class VAEMemory:
    """What a VAE takes in one direction whose finest level has `dim` channels of `item_bytes` each."""

    direction: Direction
    dim: int
    item_bytes: int

    def bytes(self, split: VAESplit) -> int:
        """What the rank with the largest part takes."""
        appetite, size = self.direction.value, split.size
        length = size.length(split.axis)
        across = size.height * size.width // length
        shard = split.shard(0).size
        wide, kept = float(shard), 0
        if split.tiles > 1:
            wide = min(length, len(split.tile_ranges(0)[0]) + appetite.beyond)
            kept = min(length, shard + appetite.kept_beyond) * appetite.kept_frame * size.frames
        frames = RUN if split.time > 1 else 1
        elements = wide * (appetite.held + appetite.per_frame * frames) + kept
        return round(across * elements * self.dim * self.item_bytes)


def choose_split_within(
    size: LatentSize, *, ranks: int, need: Callable[[VAESplit], int], limit: int
) -> VAESplit | None:
    """The fastest split among those that take no more than `limit` bytes on a rank; None if all take more.

    Tiles, which repeat some work, only where nothing else is left.
    """
    options = possible_splits(size, ranks=ranks)
    if fitting := [option for option in options if need(option) <= limit]:
        return fastest_split(fitting)
    return next(
        (option for option in tiled_splits(size, ranks=ranks) if need(option) <= limit), None
    )


def tiled_splits(size: LatentSize, *, ranks: int) -> list[VAESplit]:
    """Ways to go over the smallest parts in tiles, the largest tiles first."""
    axis = size.longer
    space = min(ranks, size.length(axis))
    shard = -(-size.length(axis) // space)
    return [
        VAESplit(size=size, axis=axis, space=space, time=1, tiles=tiles)
        for tiles in range(2, shard + 1)
        # Only counts that make the longest tile shorter.
        if -(-shard // tiles) < -(-shard // (tiles - 1))
    ]


def refuse_memory(
    size: LatentSize,
    *,
    ranks: int,
    memory: VAEMemory,
    budget: int | None,
    free_bytes: int,
) -> ConfigError | InsufficientMemoryError:
    """What to raise where `choose_split_within` finds nothing: InsufficientMemoryError if the device is too small."""
    options = possible_splits(size, ranks=ranks) + tiled_splits(size, ranks=ranks)
    least = min(map(memory.bytes, options))
    is_budget = budget is not None and budget < free_bytes
    limit = budget if budget is not None and is_budget else free_bytes
    has = f"{_hundredths(limit)} GiB {'is the budget' if is_budget else 'is free'}"
    remedies = ["more devices", "a smaller video"]
    if is_budget:
        remedies.insert(0, "a larger memory")
    if memory.item_bytes > 2:
        remedies.append("vae_dtype bfloat16")
    kind = ConfigError if is_budget else InsufficientMemoryError
    return kind(
        f"a video of {VAE_STRIDE * size.width}x{VAE_STRIDE * size.height} takes the VAE at least "
        f"{_hundredths(least, up=True)} GiB on each rank of {ranks} beside the models, even in the smallest tiles, but "
        f"{has}; use "
        f"{', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def _hundredths(size: int, *, up: bool = False) -> str:
    """GiB, rounded so that what is said to be enough is, and what is not enough looks so."""
    hundredths = -(-100 * size // GIB) if up else 100 * size // GIB
    return f"{hundredths / 100:.2f}"
