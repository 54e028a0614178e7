"""Whether a model's weights fit, and what a job takes beside them: what is planned, held against what is free."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comfy_wan_dist.ipc.errors import InsufficientMemoryError
from comfy_wan_dist.mesh.choice import fitting_mesh
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import GIB
from comfy_wan_dist.mesh.memory import load_bytes, rank_memory
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.workload import Workload
from workers.parallel.groups import MeshGroups

from .memory import CAUTION, Room, free_memory


def validate_memory(
    shape: WanShape, degrees: MeshDegrees, *, stage: int, dtype: str, room: Room
) -> None:
    """Refuse weights that do not fit, naming a mesh of as many ranks that would. Raises InsufficientMemoryError.

    On the CPU the ranks of this machine share its memory.
    """
    device, local_ranks, free_bytes = room.device, room.local_ranks, room.free()
    shared = device.type == "cpu"
    each = load_bytes(shape, degrees, stage=stage, dtype=dtype)
    need = each * local_ranks if shared else each
    if need <= free_bytes:
        return

    def fitting(as_dtype: str) -> MeshDegrees | None:
        return fitting_mesh(
            shape,
            device_count=degrees.world_size,
            share_memory=shared,
            free_bytes=free_bytes * (degrees.world_size // local_ranks) if shared else free_bytes,
            dtype=as_dtype,
        )

    fits = fitting(dtype)
    remedy = (
        f"mesh {fits} would fit"
        if fits
        else "no mesh of these devices would fit: use more or larger devices"
    )
    if fits is None and dtype == "float32" and (smaller := fitting("bfloat16")):
        remedy += f", or the dtype bfloat16 with mesh {smaller}"
    whole = f"each rank of mesh {degrees} needs"
    if shared:
        whole = (
            f"the {local_ranks} ranks of mesh {degrees} together need"
            if local_ranks > 1
            else f"mesh {degrees} needs"
        )
    raise InsufficientMemoryError(
        f"{whole} {need / GIB:.1f} GiB for the model on {device}, which has {free_bytes / GIB:.1f} GiB free; {remedy}"
    )


def margin_for_both(
    workloads: Sequence[Workload], groups: MeshGroups, *, room: Room, weights_there: int
) -> int:
    """Bytes that this rank's device has left if it holds both experts during the job; below 0 they do not fit.

    workloads: the job with each of them, since their files may be quantised differently. weights_there: of the experts'
    weights, what is on the device already.
    """
    memories = [rank_memory(each, groups.degrees, groups.rank) for each in workloads]
    beside_weights = max(memory.total - memory.weights for memory in memories)
    weights = sum(memory.weights for memory in memories)
    return room.usable() + weights_there - weights - beside_weights


def validate_host_memory(weights: int, room: Room) -> None:
    """Refuse experts that cannot take turns: while they do, host memory holds both. Raises InsufficientMemoryError.

    weights: bytes of both on one rank.
    """
    free = free_memory(torch.device("cpu"))
    need = weights * room.local_ranks
    if need > CAUTION * free:
        raise InsufficientMemoryError(
            f"the model's two experts do not fit on the devices together, and to take turns there they need "
            f"{need / GIB:.1f} GiB of host memory, of which {free / GIB:.1f} GiB are free; use a mesh with more tp, pp "
            "or fsdp"
        )
