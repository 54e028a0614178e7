"""Cutting a length into contiguous shards that may differ by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRange:
    """This rank's contiguous range [start, start + sizes[rank]) of a whole cut into `sizes`."""

    sizes: tuple[int, ...]
    rank: int

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def stop(self) -> int:
        return self.start + self.size


def shard_range(length: int, *, parts: int, rank: int) -> ShardRange:
    """Cut `length` into `parts` shards, the longer ones first; never padded."""
    short, longer = divmod(length, parts)
    sizes = tuple(short + 1 if part < longer else short for part in range(parts))
    return ShardRange(sizes=sizes, rank=rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShards:
    """How one rank's tokens are cut: `cp` out of all tokens, then `sp` out of that shard.

    Without sequence parallelism `sp` is the whole of `cp`.
    """

    cp: ShardRange
    sp: ShardRange

    @property
    def start(self) -> int:
        """Global index of the first token between the cut layers."""
        return self.cp.start + self.sp.start

    @property
    def stop(self) -> int:
        return self.start + self.sp.size


def token_shards(tokens: int, *, cp: tuple[int, int], sp: tuple[int, int]) -> TokenShards:
    """Cut `tokens`; cp and sp are (parts, rank) each."""
    shard = shard_range(tokens, parts=cp[0], rank=cp[1])
    return TokenShards(cp=shard, sp=shard_range(shard.size, parts=sp[0], rank=sp[1]))
