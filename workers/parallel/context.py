"""Context parallelism: tokens are sharded outside self-attention; inside it every query meets all keys.

Ulysses turns token shards into head shards and back, a ring passes keys and values round; together the ring runs
between the token blocks that Ulysses groups make. Cross-attention needs nothing: every rank holds all text tokens.
Source: DeepSpeed-Ulysses (arXiv 2309.14509); USP (arXiv 2405.07719).
"""

from __future__ import annotations

import torch
from torch import Tensor

from comfy_wan_dist.mesh.shards import ShardRange
from workers.model.wan import Attention, Block, WanModel, softmax_attention

from .collectives import AxisGroup
from .groups import MeshGroups
from .ring import RingAttention


class UlyssesAttention:
    """Attention over all tokens of the group for 1/size of the heads.

    Shapes: in and out [B, L_local, N, K]; N must be a multiple of the group's size; `sizes` are the ranks' lengths.
    Collectives: one all-to-all of q, k and v together, one of the output, on the ulysses axis.
    """

    def __init__(self, ulysses: AxisGroup, sizes: tuple[int, ...], inner: Attention) -> None:
        self.ulysses = ulysses
        self.sizes = sizes
        self.inner = inner

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size, own = self.ulysses.size, self.sizes[self.ulysses.rank]
        batch, _, heads, head_dim = q.shape
        # Token-major, so that what arrives from all ranks lies in token order and needs no copy.
        packed = q.new_empty(size, own, 3, batch, heads // size, head_dim)
        for i, x in enumerate((q, k, v)):
            packed[:, :, i] = x.unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4)
        received = self.ulysses.all_to_all(
            packed.flatten(0, 1), send=[own] * size, receive=self.sizes
        )
        q, k, v = received.permute(1, 2, 0, 3, 4)
        out = self.inner(q, k, v)
        returned = self.ulysses.all_to_all(
            out.transpose(0, 1), send=self.sizes, receive=[own] * size
        )
        by_rank = returned.unflatten(0, (size, own))
        out = torch.empty(batch, own, size, heads // size, head_dim, dtype=q.dtype, device=q.device)
        out.copy_(by_rank.permute(2, 1, 0, 3, 4))
        return out.flatten(2, 3)


def build_attention(groups: MeshGroups, shard: ShardRange) -> Attention:
    """The self-attention of a rank whose tokens are `shard` of the cp axis; the plain one at degree 1."""
    size = groups.ulysses.size
    # A ring's block is what one Ulysses group holds together.
    blocks = [shard.sizes[i : i + size] for i in range(0, len(shard.sizes), size)]
    attention: Attention = softmax_attention
    if groups.ring.size > 1:
        attention = RingAttention(groups.ring, tuple(sum(block) for block in blocks))
    if size > 1:
        attention = UlyssesAttention(groups.ulysses, blocks[groups.ring.rank], attention)
    return attention


def apply_context_parallel(model: WanModel, groups: MeshGroups, shard: ShardRange) -> None:
    """Let self-attention reach the tokens of all ranks for jobs cut as `shard` says.

    Holds no parameters: it may be called again for another size. At degree 1 the plain attention is restored.
    """
    attention = build_attention(groups, shard)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.self_attn.attention = attention
