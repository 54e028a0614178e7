"""Context parallelism by Ulysses: tokens are sharded outside self-attention, heads inside it.

Not covered: ring attention. Cross-attention needs nothing: every rank holds all text tokens.
Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

import torch
from torch import Tensor

from comfy_wan_dist.mesh.shards import ShardRange
from workers.model.wan import Attention, Block, WanModel, softmax_attention

from .collectives import AxisGroup


class UlyssesAttention:
    """Attention over all tokens for 1/size of the heads.

    Shapes: in and out [B, L_local, N, K]; N must be a multiple of the group's size; shards may differ in length.
    Collectives: one all-to-all of q, k and v together, one of the output, on the ulysses axis.
    """

    def __init__(self, ulysses: AxisGroup, shard: ShardRange, inner: Attention) -> None:
        self.ulysses = ulysses
        self.shard = shard
        self.inner = inner

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size, own, sizes = self.ulysses.size, self.shard.size, self.shard.sizes
        batch, _, heads, head_dim = q.shape
        # Token-major, so that what arrives from all ranks lies in token order and needs no copy.
        packed = q.new_empty(size, own, 3, batch, heads // size, head_dim)
        for i, x in enumerate((q, k, v)):
            packed[:, :, i] = x.unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4)
        received = self.ulysses.all_to_all(packed.flatten(0, 1), send=[own] * size, receive=sizes)
        q, k, v = received.permute(1, 2, 0, 3, 4)
        out = self.inner(q, k, v)
        returned = self.ulysses.all_to_all(out.transpose(0, 1), send=sizes, receive=[own] * size)
        by_rank = returned.unflatten(0, (size, own))
        out = torch.empty(batch, own, size, heads // size, head_dim, dtype=q.dtype, device=q.device)
        out.copy_(by_rank.permute(2, 1, 0, 3, 4))
        return out.flatten(2, 3)


def apply_context_parallel(model: WanModel, ulysses: AxisGroup, shard: ShardRange) -> None:
    """Let self-attention reach the tokens of all ranks for jobs cut as `shard` says.

    Holds no parameters: it may be called again for another size. At size 1 the plain attention is restored.
    """
    attention: Attention = softmax_attention
    if ulysses.size > 1:
        attention = UlyssesAttention(ulysses, shard, softmax_attention)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.self_attn.attention = attention
