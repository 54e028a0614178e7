"""Bytes that one rank needs, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from .degrees import MeshDegrees
from .shape import WanShape
from .validate import allowed_tp, allowed_ulysses

WORKING_BYTES = 512 * 2**20
"""Kept free beside the weights for buffers and libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """Bytes per rank."""

    weights: int
    working: int = WORKING_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.working


def weights_per_rank(shape: WanShape, degrees: MeshDegrees, *, bytes_per_parameter: int) -> int:
    return shape.parameters_per_rank(degrees.tp) * bytes_per_parameter


def fitting_mesh(
    shape: WanShape,
    *,
    world_size: int,
    bytes_per_parameter: int,
    free_bytes: int,
    devices_share_memory: bool,
) -> MeshDegrees | None:
    """The mesh of at most `world_size` ranks with the smallest tp whose ranks fit, or None.

    `free_bytes` is one device's, or all ranks' together when they share one memory (CPU).
    """
    for tp in allowed_tp(shape):
        need = MemoryNeed(
            weights=weights_per_rank(
                shape, MeshDegrees(tp=tp), bytes_per_parameter=bytes_per_parameter
            )
        ).total
        if tp > world_size:
            break
        ranks = world_size // tp
        if devices_share_memory:
            ranks = min(ranks, free_bytes // (need * tp))
        elif need > free_bytes:
            continue
        fits = [u for u in allowed_ulysses(shape, tp) if u <= ranks]
        if fits:
            return MeshDegrees(ulysses=max(fits), tp=tp)
    return None
