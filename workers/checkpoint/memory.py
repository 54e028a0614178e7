"""Compare what a rank is about to allocate with what its device has free, before anything is read."""

from __future__ import annotations

from pathlib import Path

import torch

from comfy_wan_dist.ipc.errors import InsufficientMemoryError
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.memory import WORKING_BYTES, fitting_mesh
from comfy_wan_dist.mesh.shape import WanShape

GIB = 2**30


def free_memory(device: torch.device) -> int:
    """Free bytes of the device. On the CPU: what the machine and the control group leave, for all ranks together."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = _available_memory(Path("/proc/meminfo"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def validate_memory(
    shape: WanShape,
    degrees: MeshDegrees,
    *,
    ranks: int,
    shard_bytes: int,
    bytes_per_parameter: int,
    device: torch.device,
    free_bytes: int,
) -> None:
    """Refuse a shard that does not fit, naming the mesh of as many ranks that would. Raises InsufficientMemoryError."""
    shared = device.type == "cpu"
    need = (ranks if shared else 1) * (shard_bytes + WORKING_BYTES)
    if need <= free_bytes:
        return

    def fitting(item_bytes: int) -> MeshDegrees | None:
        return fitting_mesh(
            shape,
            world_size=ranks,
            bytes_per_parameter=item_bytes,
            free_bytes=free_bytes,
            devices_share_memory=shared,
        )

    fits = fitting(bytes_per_parameter)
    remedy = (
        f"mesh {fits} would fit"
        if fits
        else "no mesh of these devices would fit: use more or larger devices"
    )
    if fits is None and bytes_per_parameter == 4 and (smaller := fitting(2)):
        remedy += f", or the dtype bfloat16 with mesh {smaller}"
    whole = f"each rank of mesh {degrees} needs"
    if shared:
        whole = (
            f"the {ranks} ranks of mesh {degrees} together need"
            if ranks > 1
            else f"mesh {degrees} needs"
        )
    raise InsufficientMemoryError(
        f"{whole} {need / GIB:.1f} GiB for the model on {device}, which has {free_bytes / GIB:.1f} GiB free; {remedy}"
    )


def _available_memory(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} does not say how much memory is available")
