"""How much memory a rank's device and its machine have free, what of it may be planned with, and what a job took."""

from __future__ import annotations

import contextlib
import gc
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from comfy_wan_dist.mesh.host_memory import host_memory

UNLIMITED = 2**62
CAUTION = 0.9
"""Share of what is free: whatever is planned takes somewhat more."""
RESET_PEAK_RESIDENT = "5"
"""What to write to clear_refs. Source: Linux, Documentation/filesystems/proc.rst."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one rank may plan with: of its device, and of the host's memory, which the machine's `local_ranks` share.

    On the CPU the host's memory is the device's.
    """

    device: torch.device
    local_ranks: int

    @property
    def has_host(self) -> bool:
        """Whether what is moved to host memory makes room."""
        return self.device.type == "cuda"

    def free(self) -> int:
        """Free bytes of the device; on the CPU for all ranks together."""
        return free_memory(self.device)

    def usable(self) -> int:
        """Free bytes for this rank, with those that torch keeps for this process and has not given out."""
        if self.device.type == "cpu":
            return self.free() // self.local_ranks
        reserved = torch.cuda.memory_reserved(self.device)
        return self.free() + reserved - torch.cuda.memory_allocated(self.device)

    def spare(self) -> int:
        """The part of `usable` that may be planned with."""
        return int(CAUTION * self.usable())

    def spare_on_host(self) -> int:
        """What may be planned with of this rank's part of the host's memory."""
        return int(CAUTION * free_memory(torch.device("cpu"))) // self.local_ranks

    def release(self) -> None:
        """Give back what nothing names any more."""
        gc.collect()  # a compiled block refers to itself
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Free bytes of the device. On the CPU: what the machine and control groups leave, for all ranks together."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return host_memory().free


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from now on; where Linux does not allow it, it counts from the process's start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK_RESIDENT)


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU of torch's tensors, on the CPU of the process, shared memory included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
