"""The VAE's frames cut over ranks along rows or columns, exactly: neighbours exchange what lies beyond their part.

A part's size at every level follows from its latent rows or columns, so the parts of neighbours always meet. Before
each convolution that spans rows and columns the rank gets its neighbours' outermost ones; zeros stand only at the
frame's own edges. In the middle of the network each position attends to the whole frame: keys and values are
gathered. All else is local, and the ranks go on chunk by chunk with their own history of frames.

Shape suffixes as in workers/vae/layers.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.parallel.collectives import AxisGroup
from workers.vae.layers import (
    Attention,
    CausalConv3d,
    FrameAttention,
    FrameConv2d,
    Prepare,
    frame_attention,
    own_padding,
    pad_bottom_right,
)
from workers.vae.wan22 import WanVAE

ROW_DIM, COLUMN_DIM = 2, 3
"""Dims of BTHWC."""


class HaloBorder:
    """Adds `before` rows (or columns) of the previous rank and `after` of the next one along `dim`, 0 or 1 each.

    Shapes: in and out BTHWC; `dim` grows by before + after. At the frame's edges they are zeros.
    Collectives: one exchange with each neighbour, while the rest of the input is prepared.
    """

    def __init__(self, space: AxisGroup, *, dim: int, before: int, after: int) -> None:
        self.space = space
        self.dim = dim
        self.before = before
        self.after = after

    def __call__(self, x_bthwc: Tensor, prepare: Prepare) -> Tensor:
        edges = {rank: prepare(edge).contiguous() for rank, edge in self.edges(x_bthwc).items()}
        neighbours = self.neighbours(x_bthwc)
        moving = self.space.exchange(edges, neighbours)
        size = x_bthwc.shape[self.dim]
        shape = list(x_bthwc.shape)
        shape[self.dim] += self.before + self.after
        out = x_bthwc.new_empty(shape)
        out.narrow(self.dim, self.before, size).copy_(prepare(x_bthwc))
        moving.wait()
        for is_there, rank, start in (
            (self.before, self.space.rank - 1, 0),
            (self.after, self.space.rank + 1, self.before + size),
        ):
            if is_there:
                halo = out.narrow(self.dim, start, 1)
                halo.copy_(neighbours[rank]) if rank in neighbours else halo.zero_()
        return out

    def edges(self, x_bthwc: Tensor) -> Mapping[int, Tensor]:
        """What each neighbour needs of this rank."""
        rank, edges = self.space.rank, {}
        if self.before and rank + 1 < self.space.size:
            edges[rank + 1] = x_bthwc.narrow(self.dim, x_bthwc.shape[self.dim] - 1, 1)
        if self.after and rank > 0:
            edges[rank - 1] = x_bthwc.narrow(self.dim, 0, 1)
        return edges

    def neighbours(self, x_bthwc: Tensor) -> dict[int, Tensor]:
        """Room for what this rank needs of each neighbour."""
        shape = list(x_bthwc.shape)
        shape[self.dim] = 1
        rank, room = self.space.rank, {}
        if self.before and rank > 0:
            room[rank - 1] = x_bthwc.new_empty(shape)
        if self.after and rank + 1 < self.space.size:
            room[rank + 1] = x_bthwc.new_empty(shape)
        return room


class DownsampleBorder:
    """The border of a convolution with stride 2: a row below and a column to the right, zeros at the frame's edges."""

    def __init__(self, space: AxisGroup, *, dim: int) -> None:
        self.halo = HaloBorder(space, dim=dim, before=0, after=1)
        self.padding = (0, 0, 0, 1) if dim == ROW_DIM else (0, 0, 0, 0, 0, 1)

    def __call__(self, x_bthwc: Tensor, prepare: Prepare) -> Tensor:
        return F.pad(self.halo(x_bthwc, prepare), self.padding)


class GatheredAttention:
    """Attention of this rank's positions to those of the whole frame.

    Shapes: [N, L_local, C] each; `sizes` are the ranks' lengths. Collectives: one all-gather of keys and values.
    """

    def __init__(self, space: AxisGroup, sizes: tuple[int, ...], inner: Attention) -> None:
        self.space = space
        self.sizes = sizes
        self.inner = inner

    def __call__(self, q_nlc: Tensor, k_nlc: Tensor, v_nlc: Tensor) -> Tensor:
        # [L_local, N, 2, C]: ranks are runs of dim 0.
        held = torch.stack([k_nlc, v_nlc]).transpose(0, 2)
        k_nlc, v_nlc = self.space.gather_rows(held, self.sizes).transpose(0, 2)
        return self.inner(q_nlc, k_nlc, v_nlc)


class WidenedPart:
    """Adds to a rank's part of feature maps what it needs of the parts around it.

    Shapes: BTHWC, `dim` from this rank's of `sizes` to the `held` positions. Collectives: one all-gather.
    """

    def __init__(self, space: AxisGroup, *, dim: int, sizes: tuple[int, ...], held: range) -> None:
        self.space = space
        self.dim = dim
        self.sizes = sizes
        self.held = held

    def __call__(self, x_bthwc: Tensor) -> Tensor:
        if self.space.size == 1:
            return x_bthwc
        whole = self.space.gather_rows(x_bthwc.transpose(0, self.dim), self.sizes)
        held = whole[self.held.start : self.held.stop]
        return held.transpose(0, self.dim).contiguous()  # lets go of the rest


def apply_spatial_split(
    vae: WanVAE,
    space: AxisGroup,
    *,
    dim: int,
    sizes: tuple[int, ...],
    across: int,
    only: Sequence[nn.Module] | None = None,
) -> None:
    """Let `vae` work on this rank's part of frames that are cut along `dim`.

    sizes: the parts' latent rows or columns; across: the latent's length along the other axis. only: the modules that
    are cut, if not all of `vae`; the others take what they get for whole frames.
    What an earlier call has replaced is replaced again, for another size too. At size 1 the plain network is restored.
    """
    cut = {module for part in ([vae] if only is None else only) for module in part.modules()}
    for module in vae.modules():
        is_cut = space.size > 1 and module in cut
        if isinstance(module, FrameAttention):
            positions = tuple(size * across for size in sizes)
            module.attention = (
                GatheredAttention(space, positions, frame_attention) if is_cut else frame_attention
            )
        elif isinstance(module, FrameConv2d) and module.stride[0] == 2:
            module.border = DownsampleBorder(space, dim=dim) if is_cut else pad_bottom_right
        elif isinstance(module, CausalConv3d | FrameConv2d) and module.kernel_size[-1] > 1:
            halo = HaloBorder(space, dim=dim, before=1, after=1)
            module.border = halo if is_cut else own_padding
            # The convolution's own zeros only along the other axis. Its last two dims are rows and columns.
            padding = [0] * (len(module.kernel_size) - 2) + [1, 1]
            if is_cut:
                padding[dim - 4] = 0
            module.padding = tuple(padding)
