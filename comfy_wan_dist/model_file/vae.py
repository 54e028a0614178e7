"""Recognise a Wan2.2 VAE by its tensors' names and shapes, never by its file name; other files are refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..ipc.errors import ModelFileError
from ..mesh.dtypes import WIDE_FLOATS
from ..mesh.vae_parameters import vae_parameters
from ..mesh.vae_shape import FRAME_STRIDE, TI2V_CHANNELS, VAE_STRIDE, VAEConfig
from .encoding import TensorEntry
from .expected import Found, Shapes
from .header import ModelFile
from .names import shown
from .vae_names import REMEDY, official_vae_tensors

# The published VAE has 196. From many more a model would be sketched at length before it is found to be another.
MOST_TENSORS = 1000

LAYOUT_REMEDY = (
    "download it again, or choose the Wan2.2 VAE in its original layout, wan2.2_vae.safetensors"
)


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
    config = vae_config_of({name: entry.shape for name, entry in entries.items()}, label=label)
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


def vae_config_of(shapes: Shapes, *, label: str) -> VAEConfig:
    """The sizes from the tensors' shapes, by official names.

    Raises ModelFileError unless the tensors are exactly those of a Wan2.2 VAE.
    """
    found = Found(shapes=shapes, label=label, model="a Wan2.2 VAE", remedy=LAYOUT_REMEDY)
    config = _read_config(found)
    found.require(vae_parameters(config))
    return config


def _read_config(found: Found) -> VAEConfig:
    found.shape("decoder.upsamples.0.upsamples.0.residual.2.weight", 5)
    encoder_dim = found.shape("encoder.conv1.weight", 5)[0]
    levels = _count(found, "encoder.downsamples.{}.downsamples.0.residual.2.weight")
    dim_mult: list[int] = []
    for level in range(levels):
        name = f"encoder.downsamples.{level}.downsamples.0.residual.2.weight"
        dim = found.shape(name, 5)[0]
        if encoder_dim < 1 or dim % encoder_dim:
            raise found.misshapen(name, f"its first dim must be a multiple of {encoder_dim}")
        dim_mult.append(dim // encoder_dim)
    res_blocks = _count(found, "encoder.downsamples.0.downsamples.{}.residual.2.weight")
    try:
        return VAEConfig(
            z_dim=found.shape("conv2.weight", 5)[0],
            encoder_dim=encoder_dim,
            decoder_dim=found.shape("decoder.head.2.weight", 5)[1],
            dim_mult=tuple(dim_mult),
            encoder_res_blocks=res_blocks,
            decoder_res_blocks=_count(found, "decoder.upsamples.0.upsamples.{}.residual.2.weight"),
            temporal_levels=tuple(
                f"encoder.downsamples.{level}.downsamples.{res_blocks}.time_conv.weight"
                in found.shapes
                for level in range(levels - 1)
            ),
        )
    except ValueError as error:
        raise ModelFileError(
            f"{found.label}: its tensors' shapes do not form a Wan2.2 VAE ({error}); {LAYOUT_REMEDY}"
        ) from error


def _count(found: Found, pattern: str) -> int:
    return next(count for count in itertools.count() if pattern.format(count) not in found.shapes)
