"""The process groups of a job's mesh: for each axis, the group that this rank belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch.distributed as dist

from comfy_wan_dist.mesh.degrees import AXES, MeshDegrees
from comfy_wan_dist.mesh.layout import REPLICATING_AXES, groups, job_ranks

from .collectives import AxisGroup, Ledger


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """This rank's axes. Axes of degree 1 are there too, as identities.

    rank is the one in the plane. cp is ring and ulysses together: all ranks that share the tokens of one branch.
    fsdp: the ranks that share weights, the same for every job of a plane.
    """

    degrees: MeshDegrees
    rank: int
    dp: AxisGroup
    cfg: AxisGroup
    pp: AxisGroup
    ring: AxisGroup
    ulysses: AxisGroup
    cp: AxisGroup
    tp: AxisGroup
    fsdp: AxisGroup
    ledger: Ledger

    def axes(self) -> dict[str, AxisGroup]:
        """Every group by its field's name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, AxisGroup)}


class PlaneGroups:
    """Makes the groups of a plane's ranks, each set of ranks once, for whatever mesh a job takes.

    All ranks of the plane must ask for the same meshes in the same order.
    """

    def __init__(self, *, layout: MeshDegrees, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.ledger = Ledger()
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}

    def for_mesh(self, degrees: MeshDegrees) -> MeshGroups:
        """Groups of a mesh with this plane's weights. Raises MeshError for another one.

        Collectives: one `new_group` for each set of ranks that no earlier mesh had.
        """
        players = job_ranks(self.layout, degrees)

        def axis_group(name: str, *axes: str) -> AxisGroup:
            sets = [tuple(players[rank] for rank in each) for each in groups(degrees, axes)]
            return self.axis_group(name, sets)

        by_axis = {axis: axis_group(axis, axis) for axis in AXES}
        ring, ulysses = by_axis["ring"], by_axis["ulysses"]
        if ring.size > 1 and ulysses.size > 1:
            cp = axis_group("cp", "ring", "ulysses")
        else:
            cp = ring if ring.size > 1 else ulysses
        return MeshGroups(
            degrees=degrees,
            rank=self.rank,
            **by_axis,
            cp=cp,
            # A group of its own, so that gathering the next block's weights does not queue up with a block's exchanges.
            fsdp=self.axis_group(
                "fsdp",
                groups(self.layout, REPLICATING_AXES if degrees.fsdp else ()),
                carries="weights",
            ),
            ledger=self.ledger,
        )

    def axis_group(
        self, name: str, rank_sets: Sequence[tuple[int, ...]], *, carries: str = "activations"
    ) -> AxisGroup:
        """This rank's group of `rank_sets`, disjoint sets of the plane's ranks; a group of one if none has it.

        carries: what does not queue up with anything else. Collectives: one `new_group` for each set that was not there
        before.
        """
        own: tuple[int, ...] = (self.rank,)
        for ranks in [own, *rank_sets]:
            if (carries, ranks) not in self._groups:
                assert ranks == tuple(sorted(ranks)), "new_group numbers its ranks in that order"
                group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
                self._groups[carries, ranks] = group
            if self.rank in ranks:
                own = ranks
        return AxisGroup(
            axis=name,
            ranks=own,
            rank=own.index(self.rank),
            group=self._groups[carries, own],
            ledger=self.ledger,
        )
