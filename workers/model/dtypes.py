"""torch's type for what requests, files and the planner name: the table is comfy_wan_dist/mesh/dtypes.py."""

from __future__ import annotations

import torch

from comfy_wan_dist.mesh.dtypes import BY_CODE


def dtype_named(name: str) -> torch.dtype:
    """The type of that name, such as bfloat16."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_coded(code: str) -> torch.dtype:
    """The type that files call so, such as BF16. Raises KeyError."""
    return dtype_named(BY_CODE[code].name)
