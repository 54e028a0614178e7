"""Recognise a Wan2.2 VAE by its tensors' names and shapes, never by its file name; other files are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..ipc.errors import ModelFileError
from ..mesh.dtypes import WIDE_FLOATS
from ..mesh.vae_parameters import vae_parameters
from ..mesh.vae_shape import FRAME_STRIDE, TI2V_CHANNELS, VAE_STRIDE, VAEConfig
from .encoding import TensorEntry
from .header import ModelFile
from .names import listed, shown
from .vae_names import REMEDY, official_vae_tensors

Shapes = Mapping[str, tuple[int, ...]]

# The published VAE has 196. From many more a model would be sketched at length before it is found to be another.
MOST_TENSORS = 1000

LAYOUT_REMEDY = "choose the Wan2.2 VAE in its original layout, wan2.2_vae.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class VAEFile:
    """A recognised VAE: its sizes, and where each tensor lies by its official name."""

    config: VAEConfig
    entries: Mapping[str, TensorEntry]


def read_vae_file(file: ModelFile) -> VAEFile:
    """Recognise `file`. Raises ModelFileError naming what it is instead, or what it lacks."""
    label = Path(file.path).name
    entries = official_vae_tensors(file.entries, label=label)
    if len(entries) > MOST_TENSORS or any(0 in entry.shape for entry in entries.values()):
        raise ModelFileError(f"{label} has {len(entries)} tensors, or empty ones; {REMEDY}")
    config = vae_config_of({name: entry.shape for name, entry in entries.items()})
    if config.z_dim != TI2V_CHANNELS:
        raise ModelFileError(
            f"{label} is a VAE of {config.z_dim} latent channels, but Wan2.2 TI2V-5B needs {TI2V_CHANNELS}; {REMEDY}"
        )
    if (config.spatial_factor, config.temporal_factor) != (VAE_STRIDE, FRAME_STRIDE):
        raise ModelFileError(
            f"{label} is a VAE that shrinks by {config.spatial_factor} in space and {config.temporal_factor} in time, "
            f"but Wan2.2 TI2V-5B needs {VAE_STRIDE} and {FRAME_STRIDE}; {REMEDY}"
        )
    for name, entry in entries.items():
        if entry.dtype not in WIDE_FLOATS:
            raise ModelFileError(
                f"{label} stores {shown(name)} as {entry.dtype}; a VAE may have {', '.join(WIDE_FLOATS)}, so {REMEDY}"
            )
    return VAEFile(config=config, entries=entries)


def vae_config_of(shapes: Shapes) -> VAEConfig:
    """The sizes from the tensors' shapes, by official names.

    Raises ModelFileError unless the tensors are exactly those of a Wan2.2 VAE.
    """
    config = _read_config(shapes)
    expected = vae_parameters(config)
    if missing := sorted(expected.keys() - shapes.keys()):
        raise ModelFileError(
            f"The VAE file lacks {len(missing)} of {len(expected)} tensors, the first is "
            f"{missing[0]}; it may be cut off, so download it again or {LAYOUT_REMEDY}."
        )
    if extra := sorted(shapes.keys() - expected.keys()):
        raise ModelFileError(
            f"The VAE file has {len(extra)} tensors that a Wan2.2 VAE does not have, "
            f"{listed(extra)}; {LAYOUT_REMEDY}."
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise _shape_error(name, shapes[name], str(list(shape)))
    return config


def _read_config(shapes: Shapes) -> VAEConfig:
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
            f"The tensor shapes of the VAE file do not form a Wan2.2 VAE ({error}); {LAYOUT_REMEDY}."
        ) from error


def _shape(shapes: Shapes, name: str, dims: int) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None:
        raise ModelFileError(
            f"The VAE file lacks the tensor {name}; it may be cut off, so download it again or "
            f"{LAYOUT_REMEDY}."
        )
    if len(shape) != dims:
        raise _shape_error(name, shape, f"{dims} dimensions")
    return tuple(shape)


def _shape_error(name: str, got: tuple[int, ...], allowed: str) -> ModelFileError:
    return ModelFileError(
        f"Tensor {name} of the VAE file has shape {list(got)}, but the Wan2.2 VAE needs {allowed}; "
        f"{LAYOUT_REMEDY}."
    )


def _count(shapes: Shapes, pattern: str) -> int:
    count = 0
    while pattern.format(count) in shapes:
        count += 1
    return count
