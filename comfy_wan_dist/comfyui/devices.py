"""The devices that ComfyUI uses, and asking it to free them."""

from __future__ import annotations

import comfy.model_management
import torch

from ..mesh.devices import DeviceList


def visible_cuda() -> int:
    """CUDA devices that ComfyUI uses; 0 when it runs on the CPU."""
    if comfy.model_management.cpu_state != comfy.model_management.CPUState.GPU:
        return 0
    return torch.cuda.device_count()


def cuda_devices() -> list[tuple[str, int]]:
    """Name and bytes of memory of each CUDA device that ComfyUI uses."""
    found = (torch.cuda.get_device_properties(index) for index in range(visible_cuda()))
    return [(device.name, device.total_memory) for device in found]


def free_devices(devices: DeviceList) -> None:
    """Ask ComfyUI to move its own models off the CUDA devices that a group is about to fill."""
    if devices.kind != "cuda":
        return
    for index in devices.indices:
        comfy.model_management.free_memory(1e30, torch.device("cuda", index))
    comfy.model_management.soft_empty_cache()
