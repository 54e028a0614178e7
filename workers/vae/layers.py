"""Layers of the Wan2.2 VAE: causal convolution, norm, attention and resampling, on one device.

Covered: the arithmetic of each layer and the causal history of the temporal convolutions. Not
covered: the order of the layers (wan22.py), splitting over devices, and training.

Three things can be replaced from outside without touching a layer; each is an argument or a plain
attribute:
- `FrameHistory.extend`: the only place where a temporal convolution gets and leaves earlier frames;
- `border` of every convolution that spans rows and columns: adds rows and columns around its input,
  before history is added. It is also handed what prepares the input, position by position, so that
  it may prepare and send the outermost ones first. The default leaves the zero border to the
  convolution's own `padding` (downsampling pads here, because its border is one-sided). Whoever adds
  real rows or columns sets `padding` of that dimension to 0;
- `attention` of `FrameAttention`: a function of (q, k, v).

Source of the facts: the published Wan2.2 VAE architecture; parameter names are those of its
checkpoint.

Shape suffixes: B batch, T frames of this chunk, H/W rows and columns at this level, C channels,
N = B * T, L = H * W. Activations are BTHWC: norm and 1x1 convolutions then work on the last
dimension, and a permuted view is what convolution kernels call channels-last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

Prepare = Callable[[Tensor], Tensor]
Border = Callable[[Tensor, Prepare], Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class FrameHistory:
    """Last input frames of every temporal convolution in one encode or decode run.

    Attributes: is_start (the next frame is the first of the run). Whoever drives the run calls
    `next_chunk` between chunks.
    """

    def __init__(self) -> None:
        self.is_start = True
        self._frames: dict[nn.Module, Tensor] = {}

    def extend(self, conv: nn.Module, x_bthwc: Tensor, frames: int) -> Tensor:
        """Return x with `frames` earlier frames in front, and keep the last `frames` of the result.

        Fewer are in front where the run has not had so many. The kept frames are a copy: the caller
        may overwrite x, and a long chunk is not kept alive.
        """
        earlier = self._frames.get(conv)
        window = x_bthwc if earlier is None else torch.cat([earlier, x_bthwc], dim=1)
        self._frames[conv] = window[:, -frames:].clone()
        return window

    def next_chunk(self) -> None:
        """Go on to the frames after those of the chunk that is done."""
        self.is_start = False

    def prime(self, conv: nn.Module, x_bthwc: Tensor) -> None:
        """Keep x as the earlier frames of `conv` without convolving it."""
        self._frames[conv] = x_bthwc.clone()


def as_it_is(x: Tensor) -> Tensor:
    return x


def own_padding(x_bthwc: Tensor, prepare: Prepare) -> Tensor:
    """Add nothing: the convolution pads with zeros itself."""
    return prepare(x_bthwc)


def pad_bottom_right(x_bthwc: Tensor, prepare: Prepare) -> Tensor:
    """Add one zero row below and one zero column to the right."""
    return F.pad(prepare(x_bthwc), (0, 0, 0, 1, 0, 1))


def frame_attention(q_nlc: Tensor, k_nlc: Tensor, v_nlc: Tensor) -> Tensor:
    """Softmax attention with one head over all positions of each frame. Shapes [N, L, C]."""
    q, k, v = (x_nlc.unsqueeze(1) for x_nlc in (q_nlc, k_nlc, v_nlc))
    return F.scaled_dot_product_attention(q, k, v).squeeze(1)


def _convolve(
    x_channels_last: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: str | tuple[int, ...],
) -> Tensor:
    """Convolve [N, H, W, C] or [B, T, H, W, C], as the weight has 4 or 5 dimensions."""
    assert not isinstance(padding, str)
    x = x_channels_last.movedim(-1, 1)
    is_2d = weight.ndim == 4
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        # For one sample with few channels F.conv3d takes a fallback, several times slower.
        layout = torch.channels_last if is_2d else torch.channels_last_3d
        x, weight = x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
        y = torch.mkldnn_convolution(x, weight, bias, padding, stride, (1,) * len(stride), 1)
    elif is_2d:
        y = F.conv2d(x, weight, bias, stride, padding)
    else:
        y = F.conv3d(x, weight, bias, stride, padding)
    return y.movedim(1, -1)


class CausalConv3d(nn.Conv3d):
    """Convolution over time and space that sees the present and earlier frames only.

    Space is same-padded with zeros (see `border`). Frames before the start of the run are zeros.
    `prepare` is applied to the input first; it must treat each position on its own.
    """

    def __init__(
        self, in_dim: int, out_dim: int, kernel: tuple[int, int, int], time_stride: int = 1
    ) -> None:
        padding = (0, kernel[1] // 2, kernel[2] // 2)
        super().__init__(in_dim, out_dim, kernel, (time_stride, 1, 1), padding)
        self.history_frames = kernel[0] - time_stride
        self.border: Border = own_padding

    def forward(  # type: ignore[override]
        self, x_bthwc: Tensor, history: FrameHistory, prepare: Prepare = as_it_is
    ) -> Tensor:
        window = history.extend(self, self.border(x_bthwc, prepare), self.history_frames)
        frames = x_bthwc.shape[1]
        absent = self.history_frames - (window.shape[1] - frames)
        weight = self.weight
        if absent and frames == 1:
            # Zero frames add nothing: drop their taps instead of computing them.
            weight = weight[:, :, absent:]
        elif absent:
            window = F.pad(window, (0, 0, 0, 0, 0, 0, absent, 0))
        if window.shape[1] == 1:
            stride, padding = self.stride[1:], self.padding[1:]
            y_bhwc = _convolve(window[:, 0], weight[:, :, 0], self.bias, stride, padding)
            return y_bhwc.unsqueeze(1)
        return _convolve(window, weight, self.bias, self.stride, self.padding)


class FrameConv2d(nn.Conv2d):
    """3x3 convolution of each frame on its own. `border` as in the module docstring."""

    def __init__(self, dim: int, stride: int, padding: int, border: Border) -> None:
        super().__init__(dim, dim, 3, stride, padding)
        self.border = border

    def forward(self, x_bthwc: Tensor) -> Tensor:
        x_nhwc = self.border(x_bthwc, as_it_is).flatten(0, 1)
        y_nhwc = _convolve(x_nhwc, self.weight, self.bias, self.stride, self.padding)
        return torch.unflatten(y_nhwc, 0, x_bthwc.shape[:2])


class Pointwise(nn.Module):
    """1x1 or 1x1x1 convolution: a linear map of the channels.

    `kernel_dims` (2 or 3) is the number of ones behind [out_dim, in_dim] in the weight's shape.
    """

    def __init__(self, in_dim: int, out_dim: int, kernel_dims: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim, *(1,) * kernel_dims))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.flatten(1), self.bias)


class ChannelNorm(nn.Module):
    """x / max(||x||, 1e-12) * sqrt(C) * gamma over the channels.

    `trailing_ones` is the number of ones behind C in gamma's shape. rms_norm takes its statistics
    in float32 for 16-bit inputs. Its eps stands for the floor 1e-12: they differ only near it.
    """

    def __init__(self, dim: int, trailing_ones: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim, *(1,) * trailing_ones))
        self.eps = 1e-24 / dim

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.gamma.flatten(), self.eps)


def norm_act_conv(
    norm: nn.Module, conv: nn.Module, x_bthwc: Tensor, history: FrameHistory
) -> Tensor:
    """Apply norm, SiLU and a causal convolution; x is left as it is."""
    return conv(x_bthwc, history, lambda x: F.silu(norm(x), inplace=True))


class ResidualBlock(nn.Module):
    """Twice norm, SiLU, 3x3x3 causal convolution, around a shortcut."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        # Numbers are the checkpoint's; those left out there have no parameters.
        self.residual = nn.ModuleDict(
            {
                "0": ChannelNorm(in_dim, trailing_ones=3),
                "2": CausalConv3d(in_dim, out_dim, (3, 3, 3)),
                "3": ChannelNorm(out_dim, trailing_ones=3),
                "6": CausalConv3d(out_dim, out_dim, (3, 3, 3)),
            }
        )
        self.shortcut = (
            nn.Identity() if in_dim == out_dim else Pointwise(in_dim, out_dim, kernel_dims=3)
        )

    def forward(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        layer = self.residual
        h_bthwc = norm_act_conv(layer["0"], layer["2"], x_bthwc, history)
        h_bthwc = norm_act_conv(layer["3"], layer["6"], h_bthwc, history)
        return h_bthwc.add_(self.shortcut(x_bthwc))


class FrameAttention(nn.Module):
    """Self-attention over the positions of each frame, added to the input.

    Attributes: attention (function of q, k, v of shape [N, L, C]; k and v may be longer).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(dim, trailing_ones=2)
        self.to_qkv = Pointwise(dim, 3 * dim, kernel_dims=2)
        self.proj = Pointwise(dim, dim, kernel_dims=2)
        self.attention: Attention = frame_attention

    def forward(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        qkv_nlc = self.to_qkv(self.norm(x_bthwc)).flatten(2, 3).flatten(0, 1)
        y_nlc = self.attention(*qkv_nlc.chunk(3, dim=-1))
        return self.proj(y_nlc).view(x_bthwc.shape).add_(x_bthwc)


class Downsample(nn.Module):
    """Halve rows and columns and, if asked to, the frames.

    In time, the first frame of the run stays alone and later ones go in pairs: T frames become
    (T + 1) / 2 at the start and T / 2 later.
    """

    def __init__(self, dim: int, is_temporal: bool) -> None:
        super().__init__()
        conv = FrameConv2d(dim, stride=2, padding=0, border=pad_bottom_right)
        self.resample = nn.ModuleDict({"1": conv})
        self.time_conv = CausalConv3d(dim, dim, (3, 1, 1), time_stride=2) if is_temporal else None

    def forward(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        y_bthwc = self.resample["1"](x_bthwc)
        if self.time_conv is None:
            return y_bthwc
        if not history.is_start:
            return self.time_conv(y_bthwc, history)
        first, later = y_bthwc[:, :1], y_bthwc[:, 1:]
        history.prime(self.time_conv, first)
        if later.shape[1] == 0:
            return first
        return torch.cat([first, self.time_conv(later, history)], dim=1)


class Upsample(nn.Module):
    """Double rows and columns and, if asked to, the frames.

    In time, the first frame of the run is neither doubled nor part of the convolution's history:
    T frames become 2 * T - 1 at the start and 2 * T later.
    """

    def __init__(self, dim: int, is_temporal: bool) -> None:
        super().__init__()
        conv = FrameConv2d(dim, stride=1, padding=1, border=own_padding)
        self.resample = nn.ModuleDict({"1": conv})
        self.time_conv = CausalConv3d(dim, 2 * dim, (3, 1, 1)) if is_temporal else None

    def forward(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        if self.time_conv is None:
            x_btshwc = x_bthwc.unsqueeze(2)
        elif not history.is_start:
            x_btshwc = self._double_time(x_bthwc, history)
        else:
            x_btshwc = x_bthwc[:, :1].unsqueeze(2)
            if x_bthwc.shape[1] > 1:
                later = self._double_time(x_bthwc[:, 1:], history).flatten(1, 2).unsqueeze(2)
                x_btshwc = torch.cat([x_btshwc, later], dim=1)
        # One copy puts frames in order and repeats every row and column (nearest neighbour).
        x_bthwc = repeat(x_btshwc, "b t s h w c -> b (t s) (h 2) (w 2) c")
        return self.resample["1"](x_bthwc)

    def _double_time(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        """Return [B, T, 2, H, W, C]: the two frames that each frame becomes."""
        assert self.time_conv is not None
        y_bthwc = self.time_conv(x_bthwc, history)
        return torch.unflatten(y_bthwc, -1, (2, -1)).movedim(-2, 2)


def average_down(x_bthwc: Tensor, out_dim: int, time_factor: int, space_factor: int) -> Tensor:
    """Move blocks of frames, rows and columns into channels, then average groups of channels.

    Zero frames are added in front to fill the first block. Channel order before averaging:
    (c, t, y, x).
    """
    if time_factor * space_factor == 1 and x_bthwc.shape[-1] == out_dim:
        return x_bthwc
    x = F.pad(x_bthwc, (0, 0, 0, 0, 0, 0, -x_bthwc.shape[1] % time_factor, 0))
    x = torch.unflatten(x, 3, (-1, space_factor))
    x = torch.unflatten(x, 2, (-1, space_factor))
    x = torch.unflatten(x, 1, (-1, time_factor))  # B T t H y W x C
    places = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)
    return torch.unflatten(places, 4, (out_dim, -1)).mean(-1)


def add_duplicated(
    h_bthwc: Tensor, x_bthwc: Tensor, time_factor: int, space_factor: int, is_start: bool
) -> Tensor:
    """Add to h, in place, x with its channels repeated and moved into frames, rows and columns.

    Order of the repeated channels: (c, t, y, x). At the start the first frame of x gives only the
    last of its `time_factor` frames. The enlarged x is never built.
    """
    if is_start and time_factor > 1:
        first = range(time_factor - 1, time_factor)
        _add_blocks(h_bthwc[:, :1], x_bthwc[:, :1], time_factor, space_factor, first)
        h_later, x_later = h_bthwc[:, 1:], x_bthwc[:, 1:]
    else:
        h_later, x_later = h_bthwc, x_bthwc
    if x_later.shape[1]:
        _add_blocks(h_later, x_later, time_factor, space_factor, range(time_factor))
    return h_bthwc


def _add_blocks(
    h_bthwc: Tensor, x_bthwc: Tensor, time_factor: int, space_factor: int, times: range
) -> None:
    """Add x to each position of the blocks of h; `times` are the places in a block that h has."""
    out_dim = h_bthwc.shape[-1]
    # n channels of x belong to one of h; place p of a block takes number p * n // places of them.
    x_bthwcn = torch.unflatten(x_bthwc, -1, (out_dim, -1))
    n = x_bthwcn.shape[-1]
    places = time_factor * space_factor**2
    for t in times:
        for y in range(space_factor):
            for x in range(space_factor):
                place = (t * space_factor + y) * space_factor + x
                block = h_bthwc[:, t - times.start :: len(times), y::space_factor, x::space_factor]
                block.add_(x_bthwcn[..., place * n // places])
