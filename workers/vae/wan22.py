"""The Wan2.2 VAE (16x16 in space, 4x in time, 48 latent channels) as a plain single-device module.

Covered: encoding and decoding one chunk of a video, so that memory does not grow with the number
of frames. Not covered: the order of the chunks (run.py), the normalisation of latents (latents in
and out are raw VAE space), tiling, splitting over devices, the Wan2.1 VAE, training.

Source of the facts: the published Wan2.2 VAE architecture; parameter names are those of its
checkpoint. T latent frames stand for 4 * T - 3 pixel frames: the first latent frame is one pixel
frame, each later one is four.

Shape suffixes: B batch, C channels, F pixel frames, T latent frames, H/W rows and columns. A chunk
inside the network is BTHWC, see layers.py.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from comfy_wan_dist.mesh.vae_shape import PATCH, PATCH_DIM, StageConfig, VAEConfig

from .layers import (
    CausalConv3d,
    ChannelNorm,
    Downsample,
    FrameAttention,
    FrameConv2d,
    FrameHistory,
    Pointwise,
    ResidualBlock,
    Upsample,
    add_duplicated,
    average_down,
    norm_act_conv,
)


def patchify(x_bcfhw: Tensor) -> Tensor:
    """Move 2 x 2 pixels into channels: [B, 3, F, H, W] -> [B, F, H/2, W/2, 12].

    Channel order (colour, column, row): columns before rows.
    """
    return rearrange(x_bcfhw, "b c f (h y) (w x) -> b f h w (c x y)", y=PATCH, x=PATCH)


def unpatchify(x_bthwc: Tensor) -> Tensor:
    """Undo `patchify`: [B, F, H/2, W/2, 12] -> [B, 3, F, H, W], contiguous."""
    return rearrange(x_bthwc, "b f h w (c x y) -> b c f (h y) (w x)", y=PATCH, x=PATCH)


def as_pictures(x_bthwc: Tensor) -> Tensor:
    """The decoder's output [B, F, H/2, W/2, 12] as pixels [B, 3, F, H, W] in [-1, 1]. May overwrite it."""
    return unpatchify(x_bthwc.clamp_(-1, 1))


def _residual_blocks(stage: StageConfig) -> nn.ModuleList:
    dims = [stage.in_dim] + [stage.out_dim] * stage.res_blocks
    return nn.ModuleList(map(ResidualBlock, dims[:-1], dims[1:]))


class DownStage(nn.Module):
    """Residual blocks and a downsampling step, around an averaging shortcut."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        self.config = config
        self.downsamples = _residual_blocks(config)
        if config.has_resample:
            self.downsamples.append(Downsample(config.out_dim, config.time_factor > 1))

    def forward(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        h_bthwc = x_bthwc
        for layer in self.downsamples:
            h_bthwc = layer(h_bthwc, history)
        stage = self.config
        return h_bthwc.add_(
            average_down(x_bthwc, stage.out_dim, stage.time_factor, stage.space_factor)
        )


class UpStage(nn.Module):
    """Residual blocks and an upsampling step, around a duplicating shortcut.

    The last stage has neither the step nor the shortcut.
    """

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        self.config = config
        self.upsamples = _residual_blocks(config)
        if config.has_resample:
            self.upsamples.append(Upsample(config.out_dim, config.time_factor > 1))

    def forward(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        h_bthwc = x_bthwc
        for layer in self.upsamples:
            h_bthwc = layer(h_bthwc, history)
        stage = self.config
        if not stage.has_resample:
            return h_bthwc
        return add_duplicated(
            h_bthwc, x_bthwc, stage.time_factor, stage.space_factor, history.is_start
        )


def _middle(dim: int) -> nn.ModuleList:
    return nn.ModuleList([ResidualBlock(dim, dim), FrameAttention(dim), ResidualBlock(dim, dim)])


def _head(dim: int, out_dim: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "0": ChannelNorm(dim, trailing_ones=3),
            "2": CausalConv3d(dim, out_dim, (3, 3, 3)),
        }
    )


class Encoder(nn.Module):
    """Patches [B, F, H, W, 12] -> moments [B, T, h, w, 2 * z_dim], one chunk per call."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        stages = config.encoder_stages
        self.conv1 = CausalConv3d(PATCH_DIM, stages[0].in_dim, (3, 3, 3))
        self.downsamples = nn.ModuleList(DownStage(stage) for stage in stages)
        self.middle = _middle(stages[-1].out_dim)
        self.head = _head(stages[-1].out_dim, 2 * config.z_dim)

    def forward(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        x_bthwc = self.conv1(x_bthwc, history)
        for stage in self.downsamples:
            x_bthwc = stage(x_bthwc, history)
        return self.leave(x_bthwc, history)

    def leave(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        """What comes after the levels: all that lets a position see the whole frame."""
        for layer in self.middle:
            x_bthwc = layer(x_bthwc, history)
        return norm_act_conv(self.head["0"], self.head["2"], x_bthwc, history)


class Decoder(nn.Module):
    """Latents [B, T, h, w, z_dim] -> patches [B, F, H, W, 12], one chunk per call."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        stages = config.decoder_stages
        self.conv1 = CausalConv3d(config.z_dim, stages[0].in_dim, (3, 3, 3))
        self.middle = _middle(stages[0].in_dim)
        self.upsamples = nn.ModuleList(UpStage(stage) for stage in stages)
        self.head = _head(stages[-1].out_dim, PATCH_DIM)

    def forward(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        x_bthwc = self.enter(x_bthwc, history)
        for stage in self.upsamples:
            x_bthwc = stage(x_bthwc, history)
        return self.leave(x_bthwc, history)

    def enter(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        """What comes before the levels: all that lets a position see the whole frame."""
        x_bthwc = self.conv1(x_bthwc, history)
        for layer in self.middle:
            x_bthwc = layer(x_bthwc, history)
        return x_bthwc

    def leave(self, x_bthwc: Tensor, history: FrameHistory) -> Tensor:
        """What comes after the levels."""
        return norm_act_conv(self.head["0"], self.head["2"], x_bthwc, history)


class WanVAE(nn.Module):
    """Encoder and decoder for inference; parameters take no gradient.

    Inputs are cast to the dtype of the parameters (float32, bfloat16 or float16); outputs have it.
    """

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.conv1 = Pointwise(2 * config.z_dim, 2 * config.z_dim, kernel_dims=3)
        self.conv2 = Pointwise(config.z_dim, config.z_dim, kernel_dims=3)
        self.decoder = Decoder(config)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.conv2.weight.dtype

    def arrange_weights(self) -> None:
        """Give the convolutions' weights the strides of the activations; else kernels reorder them on every call."""
        for module in self.modules():
            if isinstance(module, CausalConv3d):
                layout = torch.channels_last_3d
            elif isinstance(module, FrameConv2d):
                layout = torch.channels_last
            else:
                continue
            module.weight.data = module.weight.data.contiguous(memory_format=layout)

    def decode_chunk(self, z_bcthw: Tensor, history: FrameHistory) -> Tensor:
        """Decode the next T latent frames of a run to pixels in [-1, 1].

        Shapes: [B, z_dim, T, h, w] -> [B, 3, 4 * T, 16 * h, 16 * w]; 3 frames fewer at the start.
        """
        return as_pictures(self.decoder(self.decoder_input(z_bcthw), history))

    def decoder_input(self, z_bcthw: Tensor) -> Tensor:
        """[B, z_dim, T, h, w] -> [B, T, h, w, z_dim]."""
        return self.conv2(z_bcthw.to(self.dtype).movedim(1, -1))

    def encode_chunk(self, pixels_bcfhw: Tensor, history: FrameHistory) -> Tensor:
        """Encode the next F pixel frames of a run, in [-1, 1], to the raw mean.

        Shapes: [B, 3, F, H, W] -> [B, z_dim, F / 4, H / 16, W / 16]. F is 4 * k, at the start
        4 * k + 1 for k + 1 latent frames.
        """
        return self.mean_of(self.encoder(patchify(pixels_bcfhw.to(self.dtype)), history))

    def mean_of(self, x_bthwc: Tensor) -> Tensor:
        """The encoder's output as the raw mean [B, z_dim, T, h, w]."""
        return self.conv1(x_bthwc)[..., : self.config.z_dim].movedim(-1, 1).contiguous()
