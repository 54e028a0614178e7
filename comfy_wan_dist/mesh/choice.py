"""What `auto` chooses: the mesh for the lowest latency of one video.

CFG first when there is guidance, then Ulysses up to the head limit, then TP for what is left.
"""

from __future__ import annotations

from .degrees import MeshDegrees
from .shape import WanShape
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
