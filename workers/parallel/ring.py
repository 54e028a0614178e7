"""Ring attention: keys and values travel round the ranks, queries stay, partial results are merged.

Free of the head count, unlike Ulysses. Shards may differ in length. The merge keeps its sums in float32.
Source: Ring Attention (arXiv 2310.01889); online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .collectives import AxisGroup


class RingAttention:
    """Attention of this rank's queries over the keys of all ranks.

    Shapes: in and out [B, L_local, N, K]; `sizes` are the token counts of the ring's ranks.
    Collectives: size - 1 transfers of keys and values together to the next rank, behind the computation.
    """

    def __init__(self, ring: AxisGroup, sizes: tuple[int, ...]) -> None:
        self.ring = ring
        self.sizes = sizes

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Token-major, so that shards of another length are rows of dim 0.
        held = torch.stack([k, v]).transpose(0, 2).contiguous()
        out, lse = None, None
        for step in range(self.ring.size):
            incoming = None
            if step + 1 < self.ring.size:
                owner = (self.ring.rank - step - 1) % self.ring.size
                incoming = self.ring.pass_on(held, receive=self.sizes[owner])
            keys, values = held.transpose(0, 2)
            part, part_lse = attention_with_lse(q, keys, values)
            if out is None or lse is None:
                out, lse = part.float(), part_lse
            else:
                out, lse = merge(out, lse, part, part_lse)
            if incoming is not None:
                (held,) = incoming.wait()
        assert out is not None
        return out.to(q.dtype)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two sets of keys; out float32 [B, L, N, K], log-sum-exps float32 [B, L, N, 1]."""
    # sigmoid(b - a) is the share of b's keys in the whole softmax, without overflow.
    share = torch.sigmoid(part_lse - lse)
    return torch.lerp(out, part.float(), share), torch.logaddexp(lse, part_lse)


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention [B, L, N, K] and the log of its denominators [B, L, N, 1] in float32."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    elif q.dtype == torch.float32 or not has_flash(q, k, v):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, compute_log_sumexp=True
        )
        lse = lse[..., : q.shape[2]]  # the kernel pads it
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1).float()


def has_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the device has torch's flash kernel for these; GPUs before sm80 have not."""
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False)
    return torch.backends.cuda.can_use_flash_attention(params)
