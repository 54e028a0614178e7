"""The memory that a rank may plan with, on its device and on its machine."""

from __future__ import annotations

import gc

import torch

from .free_memory import free_memory, has_own_memory, usable_memory

CAUTION = 0.9
"""Of what is free: whatever is planned takes somewhat more."""


class Room:
    """Of one of `local_ranks` ranks on a machine, who share the host's memory, and on the CPU have no other."""

    def __init__(self, *, device: torch.device, local_ranks: int) -> None:
        self.device = device
        self.local_ranks = local_ranks

    @property
    def has_host(self) -> bool:
        """Whether what is moved to host memory makes room."""
        return has_own_memory(self.device)

    def free(self) -> int:
        """Free bytes of the device; on the CPU for all ranks together."""
        return free_memory(self.device)

    def usable(self) -> int:
        """Free bytes for this rank."""
        free_bytes = usable_memory(self.device)
        return free_bytes // self.local_ranks if self.device.type == "cpu" else free_bytes

    def spare(self) -> int:
        """What of them may be planned with."""
        return int(CAUTION * self.usable())

    def spare_on_host(self) -> int:
        """The same of this rank's part of the machine's memory."""
        return int(CAUTION * free_memory(torch.device("cpu"))) // self.local_ranks

    def release(self) -> None:
        """Give back what nothing names any more."""
        gc.collect()  # a compiled block refers to itself
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
