"""The process groups of one plane: for each axis, the group that this rank belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.layout import coordinates, groups

from .collectives import AxisGroup, Ledger


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """This rank's axes. Axes of degree 1 are there too, as identities."""

    degrees: MeshDegrees
    rank: int
    cfg: AxisGroup
    ulysses: AxisGroup
    tp: AxisGroup
    ledger: Ledger


def build_groups(degrees: MeshDegrees, rank: int, ledger: Ledger) -> MeshGroups:
    """Create the groups of every axis in one order on all ranks of the plane.

    Collectives: one `new_group` per group and axis of degree > 1; the default group must exist then.
    """

    def axis_group(axis: str) -> AxisGroup:
        size = degrees.degree(axis)
        group = None
        if size > 1:
            for ranks in groups(degrees, (axis,)):
                candidate = dist.new_group(list(ranks))
                if rank in ranks:
                    group = candidate
        return AxisGroup(
            axis=axis, size=size, rank=coordinates(degrees, rank)[axis], group=group, ledger=ledger
        )

    return MeshGroups(
        degrees=degrees,
        rank=rank,
        cfg=axis_group("cfg"),
        ulysses=axis_group("ulysses"),
        tp=axis_group("tp"),
        ledger=ledger,
    )
