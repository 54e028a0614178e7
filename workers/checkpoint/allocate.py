"""Give a meta-device module memory, without values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def allocate_parameters(
    module: nn.Module, *, dtype_of: Callable[[str], torch.dtype], device: torch.device
) -> None:
    """Replace every parameter by an empty one of its shape; `dtype_of` takes its full name."""
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        tensor = torch.empty(parameter.shape, dtype=dtype_of(name), device=device)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
