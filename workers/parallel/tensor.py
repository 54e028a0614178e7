"""Tensor parallelism: shape a plain Wan model for one rank of the tp axis.

Column layers shrink and need nothing else: their input is replicated. Row layers sum their partial outputs over
the ranks. The full-width query/key norm reduces its sum of squares. Source: Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfy_wan_dist.mesh.parameters import Cut, cut_of
from workers.model.wan import MultiHeadAttention, Norm, WanModel, square_sum

from .collectives import AxisGroup


class RowParallelLinear(nn.Module):
    """A linear whose input features are sharded.

    Collectives: `reduce` of the partial outputs, an all-reduce on tp unless sequence parallelism replaces it.
    """

    def __init__(self, full: nn.Linear, tp: AxisGroup) -> None:
        super().__init__()
        self.carries_bias = tp.rank == 0
        self.first_column = tp.rank * (full.in_features // tp.size)
        """Which of the full matrix's columns is the first one here."""
        self.reduce: Callable[[Tensor], Tensor] = tp.all_reduce_sum
        self.weight = nn.Parameter(
            full.weight.new_empty(full.out_features, full.in_features // tp.size)
        )
        self.bias = nn.Parameter(torch.empty_like(full.bias))

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
    """Give every module of `model` its shard's shape and its collective. The model's tensors are not kept.

    Call it on the meta device, before weights are loaded; at size 1 nothing changes.
    """
    if tp.size == 1:
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, Norm)):
            cut = cut_of(name)
            if cut is Cut.COLUMN:
                _keep_output_features(module, tp.size)
            elif cut is Cut.SHARDED_NORM:
                module.weight = nn.Parameter(
                    module.weight.new_empty(module.weight.shape[0] // tp.size)
                )
            elif cut is Cut.ROW:
                assert isinstance(module, nn.Linear)
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, RowParallelLinear(module, tp))
        if isinstance(module, MultiHeadAttention):
            module.mean_square = ShardedMeanSquare(tp)


def _keep_output_features(linear: nn.Module, parts: int) -> None:
    assert isinstance(linear, nn.Linear)
    linear.out_features //= parts
    linear.weight = nn.Parameter(linear.weight.new_empty(linear.out_features, linear.in_features))
    linear.bias = nn.Parameter(linear.bias.new_empty(linear.out_features))
