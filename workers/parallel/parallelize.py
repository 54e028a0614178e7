"""A model becomes parallel here: cut before it has memory, finished when it has weights, fitted to each job.

The order matters. `cut_model` works on the meta device, so that no rank ever holds a whole replica:
stages first, as what another stage holds need not be cut; then tp, which finds plain linears and changes their kind and
shape; then packing, which takes the place of a weight that has its final shape; then fsdp, which cuts whatever
parameters there are by then, and must see them in their final dtypes; memory last. Weights are loaded and LoRAs merged
between `cut_model` and `finish_model`. Sequence parallelism changes only how layers talk, and compilation must see the
layers as they will run, so it ends the work. `fit_to` sets what depends on the job's tokens; a model is fitted again
for each job, on whatever mesh of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from torch import nn

from comfy_wan_dist.mesh.parameters import parameter_of
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelModel:
    """A rank's part of a transformer, ready to run. `sequence` is there if the mesh has sp."""

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
    """This rank's shard, with memory on `device` and no values in it. Raises ConfigError if this torch has no fsdp."""
    with init_empty_weights(include_buffers=True):
        model = WanModel(shape)
        select_stage(model, groups.pp)
        apply_tensor_parallel(model, groups.tp)

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if parameter_of(name).is_float32 else dtype

    allocate_parameters(model, dtype_of=dtype_of, device=torch.device("meta"))
    apply_packing(model)
    apply_fsdp(model, groups.fsdp, device=device)
    return model.to_empty(device=device).eval()


def finish_model(
    model: WanModel, groups: MeshGroups, *, compile_backend: str | None
) -> ParallelModel:
    """Apply what comes after the weights. None compiles nothing; else `groups` must be `outside_graphs`."""
    sequence = apply_sequence_parallel(model, groups.tp) if groups.degrees.sp else None
    if compile_backend is not None:
        compile_blocks(model, backend=compile_backend)
    return ParallelModel(model=model, sequence=sequence)


def allocate_parameters(
    module: nn.Module, *, dtype_of: Callable[[str], torch.dtype], device: torch.device
) -> None:
    """Replace every parameter by an empty one of its shape on `device`; `dtype_of` takes its full name."""
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        tensor = torch.empty(parameter.shape, dtype=dtype_of(name), device=device)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
