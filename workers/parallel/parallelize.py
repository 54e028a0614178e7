"""A Wan model becomes parallel here: cut before it has memory, finished when it has values, fitted to each job.

The order matters. Cuts are made on the meta device, so that no rank ever holds a whole model. First the stage, since
it drops blocks that need no further thought. Then tp, which swaps linears. Then packing, which keeps a linear's shard
as the file has it, so it must know what tp has left. Last fsdp, which cuts whatever parameters there are then.
Sequence parallelism and compilation wait until the weights are there: the one hooks into the layers that tp has
swapped, the other must see the hooks. Context parallelism holds no parameters, and is set anew for each job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from torch import nn

from comfy_wan_dist.mesh.parameters import find_parameter
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.shards import TokenShards
from workers.model.wan import WanModel
from workers.quant.packed import apply_packing

from .compile import compile_blocks
from .context import apply_context_parallel
from .fsdp import apply_fsdp
from .groups import MeshGroups
from .sequence import SequenceParallel, apply_sequence_parallel
from .stages import select_stage
from .tensor import apply_tensor_parallel


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A rank's shard of a model, ready for jobs. `sequence` is there if the mesh has sp."""

    model: WanModel
    sequence: SequenceParallel | None

    def fit_to(self, shards: TokenShards, groups: MeshGroups) -> None:
        """Prepare the layers for a job whose tokens are cut as `shards` says."""
        apply_context_parallel(self.model, groups, shards.cp)
        if self.sequence is not None:
            self.sequence.sizes = shards.sp.sizes


def cut_model(
    shape: WanShape, groups: MeshGroups, *, dtype: torch.dtype, device: torch.device
) -> WanModel:
    """This rank's shard with memory allocated and no values in it."""
    with init_empty_weights(include_buffers=True):
        model = WanModel(shape)
        select_stage(model, groups.pp)
        apply_tensor_parallel(model, groups.tp)

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if find_parameter(name).is_float32 else dtype

    allocate_parameters(model, dtype_of=dtype_of, device=torch.device("meta"))
    apply_packing(model)
    apply_fsdp(model, groups.fsdp, device=device)
    return model.to_empty(device=device).eval()


def finish_model(
    model: WanModel, groups: MeshGroups, *, compile_backend: str | None
) -> ParallelModel:
    """The model with what is applied once the weights are there."""
    sequence = apply_sequence_parallel(model, groups.tp) if groups.degrees.sp else None
    if compile_backend is not None:
        compile_blocks(model, backend=compile_backend)
    return ParallelModel(model=model, sequence=sequence)


def allocate_parameters(
    module: nn.Module, *, dtype_of: Callable[[str], torch.dtype], device: torch.device
) -> None:
    """Replace every parameter by an empty one of its shape; `dtype_of` takes its full name."""
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        tensor = torch.empty(parameter.shape, dtype=dtype_of(name), device=device)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
