"""The environment of a group's processes, made from ComfyUI's.

ComfyUI sets variables for itself that would change or break the ranks, and a ComfyUI that was
itself started by a launcher hands on that launcher's variables. Everything else (paths, proxies,
NCCL tuning) is the user's and stays, unless it is empty, which some libraries would take for a number.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from pathlib import Path

from ..mesh.devices import DeviceList

_DROPPED = {
    # ComfyUI's allocator and determinism settings.
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    # Another launcher's world.
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
_DROPPED_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "PET_", "FSDP_", "PMI_", "OMPI_", "MV2_")


def child_environment(
    environment: Mapping[str, str],
    *,
    devices: DeviceList,
    pack_root: Path,
    interface: str | None = None,
) -> dict[str, str]:
    """`environment` for a group on `devices`, whose rank r of this machine sees its CUDA device as `cuda:r`.

    interface: the network interface towards the group's other machines, unless the user has named one; None keeps
    the collectives on this machine.
    """
    child = {
        name: value
        for name, value in environment.items()
        if value and name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    child["CUDA_VISIBLE_DEVICES"] = _visible_devices(environment, devices)
    search = [str(pack_root), *filter(None, [environment.get("PYTHONPATH")])]
    child["PYTHONPATH"] = ":".join(search)
    child["PYTHONUNBUFFERED"] = "1"
    try:
        getpass.getuser()
    except (KeyError, OSError):  # which torch's compiler would get
        child["USER"] = str(os.getuid())
    if interface is None:
        # Bootstrap sockets of the collectives stay on this machine.
        child["GLOO_SOCKET_IFNAME"] = child["NCCL_SOCKET_IFNAME"] = "lo"
    else:
        child.setdefault("GLOO_SOCKET_IFNAME", interface)
        child.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this one
    return child


def _visible_devices(environment: Mapping[str, str], devices: DeviceList) -> str:
    """Indices count the devices that ComfyUI sees, which may be a choice of the machine's."""
    if devices.kind == "cpu":
        return ""
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return ",".join(str(index) for index in devices.indices)
    names = [name.strip() for name in seen.split(",")]
    return ",".join(names[index] for index in devices.indices)
