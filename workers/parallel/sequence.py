"""Megatron sequence parallelism: between the cut layers the tp ranks share the tokens.

Norms, gates and the residual see 1/tp of the rank's tokens. Before each column-parallel pair of layers the tokens are
gathered, and the row-parallel layer behind it scatters its sums instead of giving them to all: the same bytes as the
all-reduce, in two halves. Text keys and values keep their replicated input.
Source: Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from workers.model.wan import Block, WanModel

from .collectives import AxisGroup
from .tensor import RowParallelLinear


class SequenceParallel:
    """The token shards of one tp group. `sizes`, in rank order, belong to the job at hand."""

    def __init__(self, tp: AxisGroup) -> None:
        self.tp = tp
        self.sizes: tuple[int, ...] = ()

    def gather(self, x_BLD: Tensor) -> Tensor:
        """All tokens of the group from this rank's; one all-gather on tp."""
        return self.tp.gather_rows(x_BLD.transpose(0, 1), self.sizes).transpose(0, 1)

    def reduce_scatter(self, partial_BLD: Tensor) -> Tensor:
        """This rank's tokens of the sum over the ranks; one reduce-scatter on tp."""
        return self.tp.reduce_scatter_rows(partial_BLD.transpose(0, 1), self.sizes).transpose(0, 1)

    def gather_input(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook: the first argument of a module, gathered."""
        return self.gather(arguments[0]), *arguments[1:]


def apply_sequence_parallel(model: WanModel, tp: AxisGroup) -> SequenceParallel:
    """Let a tensor-parallel model take and give token shards of the tp group. Set `sizes` before each job."""
    sequence = SequenceParallel(tp)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        for part in (block.self_attn, block.cross_attn, block.ffn):
            part.register_forward_pre_hook(sequence.gather_input)
            for module in part.modules():
                if isinstance(module, RowParallelLinear):
                    module.reduce = sequence.reduce_scatter
    return sequence
