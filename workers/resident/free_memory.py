"""Compare what a rank is about to allocate with what its device has free, before anything is read."""

from __future__ import annotations

from pathlib import Path

import torch

from comfy_wan_dist.ipc.errors import InsufficientMemoryError
from comfy_wan_dist.mesh.choice import fitting_mesh
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import GIB
from comfy_wan_dist.mesh.memory import load_bytes
from comfy_wan_dist.mesh.shape import WanShape

UNLIMITED = 2**62


def free_memory(device: torch.device) -> int:
    """Free bytes of the device. On the CPU: what the machine and the control group leave, for all ranks together."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(_available_memory(Path("/proc/meminfo")), left_by_group(Path("/sys/fs/cgroup")))


def has_own_memory(device: torch.device) -> bool:
    """Whether what is moved to host memory makes room on the device."""
    return device.type == "cuda"


def usable_memory(device: torch.device) -> int:
    """Free bytes of the device, with those that torch keeps for this process and has not given out."""
    kept = 0
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_memory(device) + kept


def validate_memory(
    shape: WanShape,
    degrees: MeshDegrees,
    *,
    stage: int,
    dtype: str,
    local_ranks: int,
    device: torch.device,
    free_bytes: int,
) -> None:
    """Refuse weights that do not fit, naming a mesh of as many ranks that would. Raises InsufficientMemoryError.

    local_ranks: those of this machine, which on the CPU share its memory.
    """
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


def left_by_group(group: Path) -> int:
    """Bytes that the limit of a control group leaves; UNLIMITED without one.

    Files that the kernel keeps in memory count as used there, such as a model that was just read; it gives them up.
    """
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        kept_files = int(counts["active_file"]) + int(counts["inactive_file"])
    except (OSError, ValueError, KeyError):
        return UNLIMITED
    return max(0, limit - used + kept_files)


def _available_memory(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} does not say how much memory is available")
