"""Tensor parallelism: shape a plain Wan model for one rank of the tp axis.

Column layers shrink and need nothing else: their input is replicated. Row layers sum their partial outputs over
the ranks. The full-width query/key norm reduces its sum of squares. Source: Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfy_wan_dist.mesh.parameters import parameter_of, parameter_slice
from workers.model.wan import MultiHeadAttention, WanModel, square_sum

from .collectives import AxisGroup


class RowParallelLinear(nn.Module):
    """A linear whose input features are sharded.

    Collectives: `reduce` of the partial outputs, an all-reduce on tp unless sequence parallelism replaces it.
    """

    def __init__(self, linear: nn.Linear, tp: AxisGroup) -> None:
        """linear: with this rank's columns of the weight, and all of the bias."""
        super().__init__()
        self.carries_bias = tp.rank == 0
        self.first_column = tp.rank * linear.weight.shape[1]
        """Which of the full matrix's columns is the first one here."""
        self.reduce: Callable[[Tensor], Tensor] = tp.all_reduce_sum
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        # One rank's partial product carries the bias: all of theirs would sum to tp times the bias.
        return self.reduce(F.linear(x, self.weight, self.bias if self.carries_bias else None))


class ShardedMeanSquare:
    """Mean of squares over the full width of tensors that are sharded by feature, [B, L, 1] each.

    Collectives: one float32 all-reduce of [B, L, n] on tp for n tensors of one length.
    """

    def __init__(self, tp: AxisGroup) -> None:
        self.tp = tp

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        sums = torch.cat([square_sum(x) for x in tensors], dim=-1)
        full_width = tensors[0].shape[-1] * self.tp.size
        return (self.tp.all_reduce_sum(sums) / full_width).split(1, dim=-1)


def apply_tensor_parallel(model: WanModel, tp: AxisGroup) -> None:
    """Give every parameter of `model` its shard's shape and every module its collective. No values are kept.

    Call it on the meta device, before weights are loaded; at size 1 nothing changes.
    """
    if tp.size == 1:
        return
    for name, parameter in list(model.named_parameters()):
        cut = parameter_slice(name, tuple(parameter.shape), tp_rank=tp.rank, tp_size=tp.size)
        if cut is not None:
            size = list(parameter.shape)
            size[cut.dim] = cut.stop - cut.start
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(parameter.new_empty(size)))
    for name, module in list(model.named_modules()):
        if isinstance(module, MultiHeadAttention):
            module.mean_square = ShardedMeanSquare(tp)
        elif isinstance(module, nn.Linear):
            module.out_features = module.weight.shape[0]
            if parameter_of(f"{name}.weight").cut_dim == 1:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, RowParallelLinear(module, tp))
