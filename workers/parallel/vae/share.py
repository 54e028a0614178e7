"""A rank's share of the VAE's work on a video: which part it has, and how it reaches what the others have."""

from __future__ import annotations

from itertools import accumulate

from torch import nn

from comfy_wan_dist.mesh.vae_split import SpaceAxis, VAESplit
from workers.parallel.groups import PlaneGroups
from workers.vae.run import VAEShare
from workers.vae.tiles import Tiling, around, decode_reach
from workers.vae.wan22 import WanVAE

from .spatial import COLUMN_DIM, ROW_DIM, WidenedPart, apply_spatial_split
from .temporal import RelayedHistory


def apply_vae_split(vae: WanVAE, split: VAESplit, plane: PlaneGroups) -> VAEShare:
    """Let `vae` work on this rank's part of `split`, whatever it worked on before.

    Collectives: the making of groups that no earlier job needed; every rank of the plane takes part.
    """
    space = plane.axis_group("vae_space", split.space_groups())
    time = plane.axis_group("vae_time", split.time_groups())
    place = split.place(plane.rank)
    chunks = split.chunks()
    ends = tuple(accumulate(sum(chunk) for chunk in chunks))
    if place is None:
        nothing = range(0)
        return VAEShare(
            rows=nothing,
            columns=nothing,
            chunks=(nothing,) * len(chunks),
            ends=ends,
            tiling=None if split.tiles == 1 else Tiling.of_nothing(split.tiles),
        )
    t, s = place
    size, shard = split.size, split.shard(s)
    own = range(shard.start, shard.stop)
    is_rows = split.axis is SpaceAxis.ROWS
    dim = ROW_DIM if is_rows else COLUMN_DIM
    apply_spatial_split(
        vae,
        space,
        dim=dim,
        sizes=shard.sizes,
        across=size.width if is_rows else size.height,
        only=None if split.tiles == 1 else seeing_whole_frames(vae),
    )
    tiling = None
    if split.tiles > 1:
        length = size.length(split.axis)
        held = around(own, decode_reach(vae.config)[0], length)
        tiling = Tiling(
            dim=dim,
            length=length,
            part=own,
            held=held,
            tiles=split.tile_ranges(s),
            widen=WidenedPart(space, dim=dim, sizes=shard.sizes, held=held),
        )
    return VAEShare(
        rows=own if is_rows else range(size.height),
        columns=range(size.width) if is_rows else own,
        chunks=split.runs(t),
        ends=ends,
        new_history=lambda: RelayedHistory(time, chunks),
        tiling=tiling,
    )


def seeing_whole_frames(vae: WanVAE) -> list[nn.Module]:
    """The modules that need whole frames, and so are cut over the ranks even where each goes over tiles of its own."""
    return [vae.decoder.conv1, *vae.decoder.middle, *vae.encoder.middle, vae.encoder.head["2"]]
