"""The process groups of one mesh: for each axis, the group that this rank belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.layout import groups

from .collectives import AxisGroup, Ledger


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """This rank's axes. Axes of degree 1 are there too, as identities.

    cp is ring and ulysses together: all ranks that share the tokens of one branch.
    """

    degrees: MeshDegrees
    rank: int
    cfg: AxisGroup
    pp: AxisGroup
    ring: AxisGroup
    ulysses: AxisGroup
    cp: AxisGroup
    tp: AxisGroup
    ledger: Ledger


def build_groups(degrees: MeshDegrees, rank: int, ledger: Ledger) -> MeshGroups:
    """Create the groups of every axis in one order on all ranks of the plane.

    Collectives: one `new_group` per group and axis of degree > 1; the default group must exist then.
    """

    def axis_group(name: str, *axes: str) -> AxisGroup:
        own: tuple[int, ...] = (rank,)
        group = None
        for ranks in groups(degrees, axes):
            candidate = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks:
                own, group = ranks, candidate
        return AxisGroup(axis=name, ranks=own, rank=own.index(rank), group=group, ledger=ledger)

    ring, ulysses = axis_group("ring", "ring"), axis_group("ulysses", "ulysses")
    if ring.size > 1 and ulysses.size > 1:
        cp = axis_group("cp", "ring", "ulysses")
    else:
        cp = ring if ring.size > 1 else ulysses
    return MeshGroups(
        degrees=degrees,
        rank=rank,
        cfg=axis_group("cfg", "cfg"),
        pp=axis_group("pp", "pp"),
        ring=ring,
        ulysses=ulysses,
        cp=cp,
        tp=axis_group("tp", "tp"),
        ledger=ledger,
    )
