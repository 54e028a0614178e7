"""How the ranks of a plane share the VAE's work on one video: parts in space, parts in time, or both.

In space the longer axis of every frame is cut, the width on a tie. In time the ranks take runs of latent frames side
by side, one chunk of the video after the other, so that memory does not grow with the video. Both are exact:
neighbours exchange what a convolution needs beyond its part. Encoding and decoding are cut alike. Where memory asks for
it a rank goes over its part in space in tiles, one after another (workers/vae/tiles.py).

Covered: the choice for a size and a number of ranks, which rank has which part, and the frames of each chunk. Not
covered: memory (vae_memory.py), bytes sent, and seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .shards import ShardRange, shard_range

RUN = 2
"""Latent frames of each part in time in a chunk: a convolution looks back two frames, at every level."""

WORTH = 1.1
"""Parts in time hold more frames at once and send more, so they must save at least this factor."""


class SpaceAxis(enum.Enum):
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSize:
    """Frames, rows and columns of a latent."""

    frames: int
    height: int
    width: int

    @property
    def longer(self) -> SpaceAxis:
        return SpaceAxis.COLUMNS if self.width >= self.height else SpaceAxis.ROWS

    def length(self, axis: SpaceAxis) -> int:
        return self.width if axis is SpaceAxis.COLUMNS else self.height


@dataclass(frozen=True, kw_only=True, slots=True)
class VAESplit:
    """A latent cut into `space` parts along `axis` and, chunk by chunk, into `time` parts.

    Part (t, s) is rank t * space + s of the plane; ranks from space * time on have none. Each part in space is done in
    `tiles`, along the same axis.

    Raises: ValueError if a part in space would be empty, or one in time shorter than others need, and for tiles of runs
    in time.
    """

    size: LatentSize
    axis: SpaceAxis
    space: int
    time: int
    tiles: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.space <= self.size.length(self.axis):
            raise ValueError(
                f"{self.space} parts do not fit into the {self.axis.value} of {self.size}"
            )
        if self.time < 1 or (self.time > 1 and self.size.frames < first_chunk(self.time)):
            raise ValueError(
                f"{self.time} parts in time need {first_chunk(self.time)} latent frames, not {self.size.frames}"
            )
        if not 1 <= self.tiles <= self.shard(0).size or (self.tiles > 1 and self.time > 1):
            raise ValueError(
                f"{self.tiles} tiles do not fit into {self.shard(0).size} {self.axis.value}, or there are runs in time"
            )

    @property
    def ranks(self) -> int:
        """Ranks that have a part."""
        return self.space * self.time

    def place(self, rank: int) -> tuple[int, int] | None:
        """The part (t, s) of a rank of the plane; None if it has none."""
        return divmod(rank, self.space) if rank < self.ranks else None

    def space_groups(self) -> list[tuple[int, ...]]:
        """Ranks that share the same frames, in the order of their parts."""
        return [tuple(range(t * self.space, (t + 1) * self.space)) for t in range(self.time)]

    def time_groups(self) -> list[tuple[int, ...]]:
        """Ranks that share the same rows and columns, in the order of their runs."""
        return [tuple(range(s, self.ranks, self.space)) for s in range(self.space)]

    def shard(self, part: int) -> ShardRange:
        """Latent rows or columns of a part in space."""
        return shard_range(self.size.length(self.axis), parts=self.space, rank=part)

    def tile_ranges(self, part: int) -> tuple[range, ...]:
        """Latent rows or columns of a part's tiles, as many for every part; the last ones may be empty."""
        shard = self.shard(part)
        cuts = [
            shard_range(shard.size, parts=self.tiles, rank=index) for index in range(self.tiles)
        ]
        return tuple(range(shard.start + cut.start, shard.start + cut.stop) for cut in cuts)

    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk the latent frames of each part in time, in the video's order."""
        return tuple(_chunks(self.size.frames, self.time))

    def runs(self, part: int) -> tuple[range, ...]:
        """For each chunk the latent frames of one part in time."""
        runs, start = [], 0
        for chunk in self.chunks():
            before = start + sum(chunk[:part])
            runs.append(range(before, before + chunk[part]))
            start += sum(chunk)
        return tuple(runs)

    @property
    def work(self) -> int:
        """Latent rows (or columns) times frames of the busiest rank in each chunk, for which the others wait."""
        return self.shard(0).size * sum(max(chunk) for chunk in self.chunks())

    def explain(self, ranks: int) -> str:
        """One line on how and why a plane of `ranks` shares the work so."""
        return "; ".join(self._reasons(ranks)) or "one rank does everything"

    def _reasons(self, ranks: int) -> Iterator[str]:
        sizes, axis = self.shard(0).sizes, self.axis.value
        if self.space > 1:
            is_tie = self.size.height == self.size.width
            why = "the width on a tie" if is_tie else "the shorter side is left whole"
            span = f"{sizes[0]}" if len(set(sizes)) == 1 else f"{sizes[-1]} or {sizes[0]}"
            yield f"{axis} in {self.space} parts of {span}; {why}, and neighbours exchange one at each border"
        if self.time > 1:
            yield (
                f"frames in {self.time} runs of {RUN} per chunk; {self.size.length(self.axis)} latent {axis} "
                f"alone do not share out over {ranks} ranks"
            )
        if self.tiles > 1:
            yield f"each part in {self.tiles} tiles one after another, which takes longer but fits into memory"
        if self.ranks < ranks:
            yield f"{ranks - self.ranks} of {ranks} ranks have no part, which would not make it faster"


def first_chunk(time: int) -> int:
    """Latent frames in the first chunk of `time` parts: the video's first frame comes on top of the runs."""
    return RUN * time + 1


def fastest_split(options: Sequence[VAESplit]) -> VAESplit:
    """The split with the least work for the busiest rank, but in space alone unless parts in time save a good deal."""
    least = min(option.work for option in options)
    near = [option for option in options if option.work <= WORTH * least]
    return min(near, key=lambda option: (option.time, option.work, option.space))


def possible_splits(size: LatentSize, *, ranks: int) -> list[VAESplit]:
    """All along the longer axis that `ranks` are enough for."""
    axis = size.longer
    return [
        VAESplit(size=size, axis=axis, space=space, time=time)
        for space in range(1, min(ranks, size.length(axis)) + 1)
        for time in range(1, ranks // space + 1)
        if time == 1 or size.frames >= first_chunk(time)
    ]


def _chunks(frames: int, time: int) -> Iterator[tuple[int, ...]]:
    if time == 1:
        yield from ((1,),) * frames
        return
    left = frames - first_chunk(time)
    yield (RUN + 1, *(RUN,) * (time - 1))
    while left > 0:
        # Only the last chunk may be short: a rank that another one looks back on has a whole run.
        yield tuple(min(RUN, max(0, left - RUN * part)) for part in range(time))
        left -= RUN * time
