"""The most memory that this rank held since a moment of its choice."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

RESET_PEAK_RESIDENT = "5"
"""What to write to clear_refs. Source: Linux, Documentation/filesystems/proc.rst."""


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
