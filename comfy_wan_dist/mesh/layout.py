"""Which rank sits where in the mesh, and which ranks form a group.

rank = ((((dp*CFG + cfg)*PP + pp)*RING + ring)*ULYSSES + ulysses)*TP + tp
"""

from __future__ import annotations

from itertools import product

from .degrees import AXES, MeshDegrees


def coordinates(degrees: MeshDegrees, rank: int) -> dict[str, int]:
    """Coordinate of `rank` on every axis."""
    if not 0 <= rank < degrees.world_size:
        raise ValueError(f"rank {rank} is outside a world of {degrees.world_size}")
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, degrees.degree(axis))
    return {axis: place[axis] for axis in AXES}


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


def all_places(degrees: MeshDegrees) -> list[tuple[int, ...]]:
    """Coordinates of all ranks in rank order."""
    return list(product(*(range(degrees.degree(axis)) for axis in AXES)))
