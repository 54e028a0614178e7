"""The Wan2.2 VAE (16x16 in space, 4x in time, 48 latent channels) as a plain single-device module.

Covered: reading the configuration from tensor shapes, encoding, and decoding chunk by chunk, so
that memory does not grow with the number of frames. Not covered: the normalisation of latents
(latents in and out are raw VAE space), tiling, splitting over devices, the Wan2.1 VAE, training.

Source of the facts: the published Wan2.2 VAE architecture; parameter names are those of its
checkpoint. T latent frames stand for 4 * T - 3 pixel frames: the first latent frame is one pixel
frame, each later one is four.

Shape suffixes: B batch, C channels, F pixel frames, T latent frames, H/W rows and columns. A chunk
inside the network is BTHWC, see layers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.model_file.names import listed
from workers.vae.layers import (
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

# 2 x 2 pixels of 3 colours are one position of the network.
PATCH: Final = 2
PATCH_DIM: Final = 3 * PATCH**2

_REMEDY: Final = "choose the Wan2.2 VAE in its original layout, wan2.2_vae.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class VAEConfig:
    """Sizes of a Wan2.2 VAE; the defaults are those of the published file.

    Attributes:
        encoder_dim, decoder_dim: channels at the finest level.
        dim_mult: width of each level, finest first, in multiples of these.
        encoder_res_blocks, decoder_res_blocks: residual blocks per level.
        temporal_levels: for each step between levels, finest first, whether it halves the frames.

    Raises: ValueError if the sizes do not fit each other.
    """

    z_dim: int = 48
    encoder_dim: int = 160
    decoder_dim: int = 256
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    encoder_res_blocks: int = 2
    decoder_res_blocks: int = 3
    temporal_levels: tuple[bool, ...] = (False, True, True)

    def __post_init__(self) -> None:
        sizes = (self.z_dim, self.encoder_dim, self.decoder_dim, *self.dim_mult)
        if min(*sizes, self.encoder_res_blocks, self.decoder_res_blocks) < 1:
            raise ValueError(f"sizes must be positive, got {self}")
        if len(self.temporal_levels) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temporal_levels has {len(self.temporal_levels)} entries, but "
                f"{len(self.dim_mult)} levels have {len(self.dim_mult) - 1} steps between them"
            )
        for stage in self.encoder_stages:
            if stage.in_dim * stage.places % stage.out_dim:
                raise ValueError(f"no shortcut can be formed around an encoder stage: {stage}")
        for stage in self.decoder_stages[:-1]:
            share = stage.in_dim // stage.out_dim
            if stage.in_dim % stage.out_dim or stage.places % share:
                raise ValueError(f"no shortcut can be formed around a decoder stage: {stage}")

    @property
    def spatial_factor(self) -> int:
        """Pixel rows (and columns) per latent row."""
        return int(PATCH * 2 ** len(self.temporal_levels))

    @property
    def temporal_factor(self) -> int:
        """Pixel frames per latent frame after the first."""
        return int(2 ** sum(self.temporal_levels))

    @property
    def encoder_stages(self) -> tuple[StageConfig, ...]:
        """Stages of the encoder in order of execution."""
        dims = [self.encoder_dim * mult for mult in (1, *self.dim_mult)]
        return self._stages(dims, self.temporal_levels, self.encoder_res_blocks)

    @property
    def decoder_stages(self) -> tuple[StageConfig, ...]:
        """Stages of the decoder in order of execution."""
        dims = [self.decoder_dim * mult for mult in (self.dim_mult[-1], *self.dim_mult[::-1])]
        return self._stages(dims, self.temporal_levels[::-1], self.decoder_res_blocks)

    @staticmethod
    def _stages(
        dims: list[int], temporal: tuple[bool, ...], res_blocks: int
    ) -> tuple[StageConfig, ...]:
        resampled = [(2 if is_temporal else 1, 2) for is_temporal in temporal]
        return tuple(
            StageConfig(
                in_dim=dims[i],
                out_dim=dims[i + 1],
                res_blocks=res_blocks,
                time_factor=time_factor,
                space_factor=space_factor,
            )
            for i, (time_factor, space_factor) in enumerate([*resampled, (1, 1)])
        )

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> VAEConfig:
        """Read the sizes from a file's tensor shapes, by official names.

        Raises: ModelFileError unless the tensors are exactly those of a Wan2.2 VAE.
        """
        config = _read_config(shapes)
        expected = expected_shapes(config)
        missing = sorted(expected.keys() - shapes.keys())
        if missing:
            raise ModelFileError(
                f"The VAE file lacks {len(missing)} of {len(expected)} tensors, the first is "
                f"{missing[0]}; it may be cut off, so download it again or {_REMEDY}."
            )
        extra = sorted(shapes.keys() - expected.keys())
        if extra:
            raise ModelFileError(
                f"The VAE file has {len(extra)} tensors that a Wan2.2 VAE does not have, "
                f"{listed(extra)}; {_REMEDY}."
            )
        for name, shape in expected.items():
            if tuple(shapes[name]) != shape:
                raise _shape_error(name, shapes[name], str(list(shape)))
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One level of the encoder or decoder with the step to the next.

    Attributes: time_factor, space_factor (1 or 2: what the step multiplies or divides by).
    """

    in_dim: int
    out_dim: int
    res_blocks: int
    time_factor: int
    space_factor: int

    @property
    def has_resample(self) -> bool:
        return self.space_factor > 1

    @property
    def places(self) -> int:
        """Positions in a block of frames, rows and columns that the step merges or makes."""
        return self.time_factor * self.space_factor**2


def _read_config(shapes: Mapping[str, tuple[int, ...]]) -> VAEConfig:
    _shape(shapes, "decoder.upsamples.0.upsamples.0.residual.2.weight", 5)
    z_dim = _shape(shapes, "conv2.weight", 5)[0]
    encoder_dim = _shape(shapes, "encoder.conv1.weight", 5)[0]
    decoder_dim = _shape(shapes, "decoder.head.2.weight", 5)[1]
    levels = _count(shapes, "encoder.downsamples.{}.downsamples.0.residual.2.weight")
    dim_mult: list[int] = []
    for level in range(levels):
        name = f"encoder.downsamples.{level}.downsamples.0.residual.2.weight"
        shape = _shape(shapes, name, 5)
        if encoder_dim < 1 or shape[0] % encoder_dim:
            raise _shape_error(name, shape, f"a multiple of {encoder_dim} in front")
        dim_mult.append(shape[0] // encoder_dim)
    res_blocks = _count(shapes, "encoder.downsamples.0.downsamples.{}.residual.2.weight")
    try:
        return VAEConfig(
            z_dim=z_dim,
            encoder_dim=encoder_dim,
            decoder_dim=decoder_dim,
            dim_mult=tuple(dim_mult),
            encoder_res_blocks=res_blocks,
            decoder_res_blocks=_count(shapes, "decoder.upsamples.0.upsamples.{}.residual.2.weight"),
            temporal_levels=tuple(
                f"encoder.downsamples.{level}.downsamples.{res_blocks}.time_conv.weight" in shapes
                for level in range(levels - 1)
            ),
        )
    except ValueError as error:
        raise ModelFileError(
            f"The tensor shapes of the VAE file do not form a Wan2.2 VAE ({error}); {_REMEDY}."
        ) from error


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str, dims: int) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None:
        raise ModelFileError(
            f"The VAE file lacks the tensor {name}; it may be cut off, so download it again or "
            f"{_REMEDY}."
        )
    if len(shape) != dims:
        raise _shape_error(name, shape, f"{dims} dimensions")
    return tuple(shape)


def _shape_error(name: str, got: tuple[int, ...], allowed: str) -> ModelFileError:
    return ModelFileError(
        f"Tensor {name} of the VAE file has shape {list(got)}, but the Wan2.2 VAE needs {allowed}; "
        f"{_REMEDY}."
    )


def _count(shapes: Mapping[str, tuple[int, ...]], pattern: str) -> int:
    count = 0
    while pattern.format(count) in shapes:
        count += 1
    return count


def expected_shapes(config: VAEConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the checkpoint, by name. Allocates nothing."""
    with torch.device("meta"):
        model = WanVAE(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def patchify(x_bcfhw: Tensor) -> Tensor:
    """Move 2 x 2 pixels into channels: [B, 3, F, H, W] -> [B, F, H/2, W/2, 12].

    Channel order (colour, column, row): columns before rows.
    """
    x = torch.unflatten(torch.unflatten(x_bcfhw, 4, (-1, PATCH)), 3, (-1, PATCH))  # B C F H y W x
    return x.permute(0, 2, 3, 5, 1, 6, 4).flatten(4)


def unpatchify(x_bthwc: Tensor) -> Tensor:
    """Undo `patchify`: [B, F, H/2, W/2, 12] -> [B, 3, F, H, W], contiguous."""
    x = torch.unflatten(x_bthwc, 4, (-1, PATCH, PATCH))  # B F H W C x y
    return x.permute(0, 4, 1, 2, 6, 3, 5).flatten(5).flatten(3, 4)


def as_pictures(x_bthwc: Tensor) -> Tensor:
    """The decoder's output [B, F, H/2, W/2, 12] as pixels [B, 3, F, H, W] in [-1, 1]. May overwrite it."""
    return unpatchify(x_bthwc.clamp_(-1, 1))


class DownStage(nn.Module):
    """Residual blocks and a downsampling step, around an averaging shortcut."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        self.config = config
        dims = [config.in_dim] + [config.out_dim] * config.res_blocks
        self.downsamples = nn.ModuleList(
            ResidualBlock(dims[i], dims[i + 1]) for i in range(config.res_blocks)
        )
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
        dims = [config.in_dim] + [config.out_dim] * config.res_blocks
        self.upsamples = nn.ModuleList(
            ResidualBlock(dims[i], dims[i + 1]) for i in range(config.res_blocks)
        )
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
        x_bthwc: Tensor = self.conv2(z_bcthw.to(self.dtype).movedim(1, -1))
        return x_bthwc

    def encode_chunk(self, pixels_bcfhw: Tensor, history: FrameHistory) -> Tensor:
        """Encode the next F pixel frames of a run, in [-1, 1], to the raw mean.

        Shapes: [B, 3, F, H, W] -> [B, z_dim, F / 4, H / 16, W / 16]. F is 4 * k, at the start
        4 * k + 1 for k + 1 latent frames.
        """
        return self.mean_of(self.encoder(patchify(pixels_bcfhw.to(self.dtype)), history))

    def mean_of(self, x_bthwc: Tensor) -> Tensor:
        """The encoder's output as the raw mean [B, z_dim, T, h, w]."""
        mean_bthwc: Tensor = self.conv1(x_bthwc)[..., : self.config.z_dim]
        return mean_bthwc.movedim(-1, 1).contiguous()

    def decode_chunks(self, z_bcthw: Tensor) -> Iterator[Tensor]:
        """Decode one latent frame at a time; yield [B, 3, 1, H, W], then [B, 3, 4, H, W] each.

        z is raw VAE space, [B, z_dim, T, h, w] with T >= 1. Pixels are in [-1, 1].

        Raises: ValueError for another shape.
        """
        if z_bcthw.ndim != 5 or z_bcthw.shape[1] != self.config.z_dim or 0 in z_bcthw.shape:
            raise ValueError(
                f"z has shape {list(z_bcthw.shape)}, expected [B, {self.config.z_dim}, T, h, w]"
            )
        return self._decode_run(z_bcthw)

    def _decode_run(self, z_bcthw: Tensor) -> Iterator[Tensor]:
        history = FrameHistory()
        for frame_bcthw in torch.split(z_bcthw, 1, dim=2):
            yield self.decode_chunk(frame_bcthw, history)
            history.next_chunk()

    def decode(self, z_bcthw: Tensor) -> Tensor:
        """Decode raw latents [B, z_dim, T, h, w] to pixels [B, 3, 4 * T - 3, 16 * h, 16 * w]."""
        return torch.cat(list(self.decode_chunks(z_bcthw)), dim=2)

    def encode_chunks(self, pixels_bcfhw: Tensor) -> Iterator[Tensor]:
        """Encode 1 pixel frame, then 4 at a time; yield the raw mean [B, z_dim, 1, h, w] of each.

        Pixels are [B, 3, F, H, W] in [-1, 1], F >= 1, H and W multiples of 16. Frames beyond the
        last full 4 * k + 1 are not encoded.

        Raises: ValueError for another shape.
        """
        factor = self.config.spatial_factor
        shape = pixels_bcfhw.shape
        if len(shape) != 5 or shape[1] != 3 or 0 in shape or shape[3] % factor or shape[4] % factor:
            raise ValueError(
                f"pixels have shape {list(shape)}, expected [B, 3, F, H, W] with H and W "
                f"multiples of {factor}"
            )
        return self._encode_run(pixels_bcfhw)

    def _encode_run(self, pixels_bcfhw: Tensor) -> Iterator[Tensor]:
        history = FrameHistory()
        yield self.encode_chunk(pixels_bcfhw[:, :, :1], history)
        history.next_chunk()
        step = self.config.temporal_factor
        for end in range(1 + step, pixels_bcfhw.shape[2] + 1, step):
            yield self.encode_chunk(pixels_bcfhw[:, :, end - step : end], history)

    def encode(self, pixels_bcfhw: Tensor) -> Tensor:
        """Encode pixels [B, 3, F, H, W] to raw means [B, z_dim, (F - 1) // 4 + 1, H/16, W/16]."""
        return torch.cat(list(self.encode_chunks(pixels_bcfhw)), dim=2)
