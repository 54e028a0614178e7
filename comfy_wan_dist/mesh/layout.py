"""Which rank sits where in a mesh, and which ranks form a group.

rank = ((((dp*CFG + cfg)*PP + pp)*RING + ring)*ULYSSES + ulysses)*TP + tp

A loaded plane can serve a job on another mesh as long as no rank needs other weights: pp, tp and the flags stay, while
dp, cfg, ring and ulysses only replicate them. `job_ranks` says which rank then plays which part.
"""

from __future__ import annotations

from dataclasses import replace

from ..ipc.errors import MeshError
from .degrees import AXES, MeshDegrees

REPLICATING_AXES = ("dp", "cfg", "ring", "ulysses")


def coordinates(degrees: MeshDegrees, rank: int, *, axes: tuple[str, ...] = AXES) -> dict[str, int]:
    """Coordinate of `rank` on every axis; of the mesh that only `axes` make, if not all are given."""
    place, outer = {}, rank
    for axis in reversed(axes):
        outer, place[axis] = divmod(outer, degrees.degree(axis))
    if outer:
        raise ValueError(f"rank {rank} is outside a world of {degrees.world_size}")
    return {axis: place[axis] for axis in axes}


def rank_at(degrees: MeshDegrees, place: dict[str, int], *, axes: tuple[str, ...] = AXES) -> int:
    """Inverse of `coordinates`."""
    rank = 0
    for axis in axes:
        rank = rank * degrees.degree(axis) + place[axis]
    return rank


def stage_ranks(degrees: MeshDegrees) -> list[int]:
    """The rank of each stage that has the longest shards."""
    place = dict.fromkeys(AXES, 0)
    return [rank_at(degrees, {**place, "pp": stage}) for stage in range(degrees.pp)]


def groups(degrees: MeshDegrees, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Global ranks of every group that spans `axes`, each in the order of the group ranks.

    All groups together hold each rank once. `("ring", "ulysses")` gives the context-parallel groups.
    """
    spanned: dict[tuple[int, ...], list[int]] = {}
    for rank in range(degrees.world_size):
        place = coordinates(degrees, rank)
        fixed = tuple(place[axis] for axis in AXES if axis not in axes)
        spanned.setdefault(fixed, []).append(rank)
    return [tuple(ranks) for ranks in spanned.values()]


def weight_layout(degrees: MeshDegrees) -> MeshDegrees:
    """What `degrees` says about weights: all meshes with the same layout can run on one loaded plane.

    The replicating axes are written as one ring, which any number of ranks can form.
    """
    return replace(degrees, dp=1, cfg=1, ring=degrees.dp * degrees.replicas, ulysses=1)


def job_ranks(layout: MeshDegrees, job: MeshDegrees) -> tuple[int, ...]:
    """For each rank of the job's mesh, the rank of the plane that plays it.

    Raises MeshError if the job's mesh needs other weights than `layout` has.
    """
    if weight_layout(job) != weight_layout(layout):
        raise MeshError(
            f"mesh {job} cannot run on a group loaded as {weight_layout(layout)}: "
            "pp, tp, sp, fsdp and the number of ranks must stay"
        )
    if job.fsdp and job.dp > 1:
        raise MeshError(
            f"mesh {job} cuts a batch between ranks that share weights with fsdp; all of them must run every block "
            "together, so dp must be 1"
        )
    players = []
    for rank in range(job.world_size):
        place = coordinates(job, rank)
        replica = rank_at(job, place, axes=REPLICATING_AXES)
        held = coordinates(layout, replica, axes=REPLICATING_AXES)
        players.append(rank_at(layout, {**place, **held}))
    return tuple(players)
