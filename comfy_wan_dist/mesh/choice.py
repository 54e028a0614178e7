"""What `auto` chooses, for a plane and for each of its jobs.

Latency of one video: CFG first when there is guidance, then Ulysses up to the head limit, then TP, and a ring for
ranks that the heads leave over. A batch is cut into sub-planes first: its samples need nothing from each other.
How a batch is shared out over planes that are groups of their own is decided before, by `piece_sizes`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from .degrees import MeshDegrees
from .layout import weight_layout
from .shape import LatentGrid, WanShape
from .validate import allowed_tp, allowed_ulysses


def choose_mesh(shape: WanShape, *, device_count: int, guided: bool) -> MeshDegrees:
    """The valid mesh that uses most devices; among equals the one with the smallest tp."""
    candidates = [
        MeshDegrees(cfg=cfg, ulysses=ulysses, tp=tp)
        for cfg in ((1, 2) if guided else (1,))
        for tp in allowed_tp(shape)
        for ulysses in allowed_ulysses(shape, tp)
        if cfg * tp * ulysses <= device_count
    ]
    return max(candidates, key=lambda mesh: (mesh.world_size, mesh.cfg, mesh.ulysses))


def choose_job_mesh(
    plane: MeshDegrees,
    shape: WanShape,
    grid: LatentGrid,
    *,
    batch: int,
    guided: bool,
    is_auto: bool,
) -> MeshDegrees:
    """The mesh for one job on a loaded plane; no rank idles if any mesh can avoid it.

    A mesh that the user named stays as it is, except that without guidance its cfg axis joins the context axes.
    """
    if not is_auto and (guided or plane.cfg == 1):
        return plane
    replicas = weight_layout(plane).ring
    heads = allowed_ulysses(shape, plane.tp)
    candidates = []
    for dp, cfg, ulysses in product(range(1, batch + 1), (1, 2) if guided else (1,), heads):
        ring, rest = divmod(replicas, dp * cfg * ulysses)
        if rest or batch % dp or (not is_auto and dp > 1):
            continue
        mesh = replace(plane, dp=dp, cfg=cfg, ring=ring, ulysses=ulysses)
        if grid.tokens >= mesh.cp * (mesh.tp if mesh.sp else 1):
            candidates.append(mesh)
    return max(candidates, key=lambda mesh: (mesh.dp, mesh.cfg, mesh.ulysses), default=plane)


def piece_sizes(degrees: MeshDegrees, *, batch: int) -> tuple[int, ...]:
    """How many samples of a batch each piece for one of the mesh's planes gets, in the batch's order.

    One plane takes the batch whole. Among several, single samples share out best, but pipeline stages need several at
    once to stay busy: with pp there is one piece per plane.
    """
    if degrees.dp == 1:
        return (batch,)
    count = min(batch, degrees.dp) if degrees.pp > 1 else batch
    size, rest = divmod(batch, count)
    return tuple(size + (index < rest) for index in range(count))
