"""The memory that decoding takes on a rank, and the choice of a split that keeps to a budget.

Covered: the tensors that are alive at once, the VAE's weights left out. Not covered: what a library needs inside of a
convolution, rows received from neighbours, and fragments: so a decode takes somewhat more than is said here.
"""

from __future__ import annotations

from ..ipc.errors import ConfigError, InsufficientMemoryError
from .vae_split import RUN, LatentSize, VAESplit, fastest_split, possible_splits

HELD = 2300
PER_FRAME = 1545
"""Elements for each latent row, column and channel of the decoder's finest level: for all frames that convolutions look
back on, and for each latent frame that goes through at once. Measured; a test measures them again."""

GIB = 2**30


def decode_bytes(split: VAESplit, *, decoder_dim: int, item_bytes: int) -> int:
    """Of the rank with the largest part. decoder_dim: channels of the decoder's finest level."""
    across = split.size.height * split.size.width // split.size.length(split.axis)
    positions = split.shard(0).size * across
    frames = RUN if split.time > 1 else 1
    return positions * decoder_dim * (HELD + PER_FRAME * frames) * item_bytes


def choose_split_within(
    size: LatentSize,
    *,
    ranks: int,
    decoder_dim: int,
    item_bytes: int,
    budget: int | None,
    free_bytes: int,
) -> VAESplit:
    """The split that is done first among those that keep to `budget`.

    budget: bytes on each rank; None for what it has free. Since every rank has something else free, that has no say in
    the choice, which must be the same on all of them.

    Raises: ConfigError if even the split that takes least is beyond the budget, InsufficientMemoryError if it is beyond
    what is free.
    """

    def need(split: VAESplit) -> int:
        return decode_bytes(split, decoder_dim=decoder_dim, item_bytes=item_bytes)

    options = possible_splits(size, ranks=ranks)
    least = min(map(need, options))
    limit = free_bytes if budget is None else budget
    if least > limit:
        has = f"{limit / GIB:.2f} GiB {'is free' if budget is None else 'is the budget'}"
        error = InsufficientMemoryError if budget is None else ConfigError
        raise error(
            f"decoding {16 * size.width}x{16 * size.height} takes at least {least / GIB:.2f} GiB on each rank of "
            f"{ranks} beside the models, but {has}; use more devices, a smaller video, or vae_dtype bfloat16"
        )
    return fastest_split([option for option in options if budget is None or need(option) <= budget])
