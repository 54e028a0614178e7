"""The parameters of a Wan2.2 VAE: names and shapes from its sizes.

Source: key table of the official Wan2.2 VAE. Numbers that a name leaves out have no parameters there.
"""

from __future__ import annotations

from collections.abc import Iterator

from .vae_shape import PATCH_DIM, StageConfig, VAEConfig

Parameters = Iterator[tuple[str, tuple[int, ...]]]

POINT = (1, 1, 1)
CUBE = (3, 3, 3)


def vae_parameters(config: VAEConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its official name, in the order of execution but for conv1 and conv2."""
    return dict(_vae(config))


def _vae(config: VAEConfig) -> Parameters:
    z_dim = config.z_dim
    down, up = config.encoder_stages, config.decoder_stages
    yield from _conv("encoder.conv1", PATCH_DIM, down[0].in_dim, CUBE)
    for i, stage in enumerate(down):
        yield from _stage(f"encoder.downsamples.{i}.downsamples", stage, time_places=1)
    yield from _middle("encoder.middle", down[-1].out_dim)
    yield from _head("encoder.head", down[-1].out_dim, 2 * z_dim)
    yield from _conv("conv1", 2 * z_dim, 2 * z_dim, POINT)
    yield from _conv("conv2", z_dim, z_dim, POINT)
    yield from _conv("decoder.conv1", z_dim, up[0].in_dim, CUBE)
    yield from _middle("decoder.middle", up[0].in_dim)
    for i, stage in enumerate(up):
        yield from _stage(f"decoder.upsamples.{i}.upsamples", stage, time_places=2)
    yield from _head("decoder.head", up[-1].out_dim, PATCH_DIM)


def _stage(path: str, stage: StageConfig, *, time_places: int) -> Parameters:
    """time_places: frames that the step in time makes of one."""
    in_dim, dim = stage.in_dim, stage.out_dim
    for i in range(stage.res_blocks):
        yield from _residual(f"{path}.{i}", dim if i else in_dim, dim)
    step = f"{path}.{stage.res_blocks}"
    if stage.has_resample:
        yield from _conv(f"{step}.resample.1", dim, dim, (3, 3))
    if stage.time_factor > 1:
        yield from _conv(f"{step}.time_conv", dim, time_places * dim, (3, 1, 1))


def _middle(path: str, dim: int) -> Parameters:
    yield from _residual(f"{path}.0", dim, dim)
    yield f"{path}.1.norm.gamma", (dim, 1, 1)
    yield from _conv(f"{path}.1.to_qkv", dim, 3 * dim, (1, 1))
    yield from _conv(f"{path}.1.proj", dim, dim, (1, 1))
    yield from _residual(f"{path}.2", dim, dim)


def _residual(path: str, in_dim: int, out_dim: int) -> Parameters:
    yield f"{path}.residual.0.gamma", (in_dim, 1, 1, 1)
    yield from _conv(f"{path}.residual.2", in_dim, out_dim, CUBE)
    yield f"{path}.residual.3.gamma", (out_dim, 1, 1, 1)
    yield from _conv(f"{path}.residual.6", out_dim, out_dim, CUBE)
    if in_dim != out_dim:
        yield from _conv(f"{path}.shortcut", in_dim, out_dim, POINT)


def _head(path: str, dim: int, out_dim: int) -> Parameters:
    yield f"{path}.0.gamma", (dim, 1, 1, 1)
    yield from _conv(f"{path}.2", dim, out_dim, CUBE)


def _conv(path: str, in_dim: int, out_dim: int, kernel: tuple[int, ...]) -> Parameters:
    yield f"{path}.weight", (out_dim, in_dim, *kernel)
    yield f"{path}.bias", (out_dim,)
