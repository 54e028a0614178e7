"""A safetensors file without a name on any disk, which processes of this machine and user can open while it is kept."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor


class MemoryFile:
    """path: leads to it until this is gone."""

    def __init__(self) -> None:
        fd = os.memfd_create("comfy-wan-dist-lora", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"


def write_memory_file(tensors: Mapping[str, Tensor]) -> MemoryFile:
    file = MemoryFile()
    # Copies: some of them may share memory, which the format does not.
    content = save({name: each.detach().cpu().clone() for name, each in tensors.items()})
    Path(file.path).write_bytes(content)
    return file
