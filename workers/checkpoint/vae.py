"""Load a VAE file whole onto each device of a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.dtypes import WIDE_FLOATS
from comfy_wan_dist.mesh.shape import TI2V_CHANNELS
from comfy_wan_dist.model_file.encoding import TensorEntry
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.names import shown
from comfy_wan_dist.model_file.vae_names import REMEDY, official_vae_tensors
from workers.parallel.parallelize import allocate_parameters
from workers.vae.run import SPATIAL, TEMPORAL
from workers.vae.wan22 import VAEConfig, WanVAE

from .sharing import Milestone, ReadGroups, SharedReader, in_sections, pass_by, read_alone

# The published VAE has 196. From many more a model would be sketched at length before it is found to be another.
MOST_TENSORS = 1000


def vae_bytes(path: str, *, dtype: torch.dtype) -> int:
    """What the weights of the VAE in `path` take. Raises ModelFileError."""
    entries = official_vae_tensors(read_model_file(path).entries, label=Path(path).name)
    return sum(math.prod(entry.shape) for entry in entries.values()) * dtype.itemsize


def load_vae(path: str, *, dtype: torch.dtype, device: torch.device) -> tuple[WanVAE, int]:
    """The VAE in `path` and the bytes read, on one rank alone. Raises ModelFileError."""
    vae, entries = build_vae(path, dtype=dtype, device=device)
    return vae, load_vae_weights(vae, entries, sharing=read_alone(), milestone=pass_by)


def build_vae(
    path: str, *, dtype: torch.dtype, device: torch.device
) -> tuple[WanVAE, Mapping[str, TensorEntry]]:
    """The VAE in `path` without values, and where they are. Raises ModelFileError."""
    label = Path(path).name
    entries = official_vae_tensors(read_model_file(path).entries, label=label)
    if len(entries) > MOST_TENSORS or any(0 in entry.shape for entry in entries.values()):
        raise ModelFileError(f"{label} has {len(entries)} tensors, or empty ones; {REMEDY}")
    config = VAEConfig.from_shapes({name: entry.shape for name, entry in entries.items()})
    if config.z_dim != TI2V_CHANNELS:
        raise ModelFileError(
            f"{label} is a VAE of {config.z_dim} latent channels, but Wan2.2 TI2V-5B needs {TI2V_CHANNELS}; {REMEDY}"
        )
    if (config.spatial_factor, config.temporal_factor) != (SPATIAL, TEMPORAL):
        raise ModelFileError(
            f"{label} is a VAE that shrinks by {config.spatial_factor} in space and {config.temporal_factor} in time, "
            f"but Wan2.2 TI2V-5B needs {SPATIAL} and {TEMPORAL}; {REMEDY}"
        )
    for name, entry in entries.items():
        if entry.dtype not in WIDE_FLOATS:
            raise ModelFileError(
                f"{label} stores {shown(name)} as {entry.dtype}; a VAE may have {', '.join(WIDE_FLOATS)}, so {REMEDY}"
            )
    with init_empty_weights(include_buffers=True):
        vae = WanVAE(config)
    allocate_parameters(vae, dtype_of=lambda _: dtype, device=device)
    return vae, entries


def load_vae_weights(
    vae: WanVAE,
    entries: Mapping[str, TensorEntry],
    *,
    sharing: ReadGroups,
    milestone: Milestone,
) -> int:
    """Stream the values in; returns the bytes asked of the file. Of `sharing` everyone holds the VAE.

    Collectives: those of the milestones and of `SharedReader`. Raises ModelFileError.
    """
    parameters = sorted(vae.named_parameters(), key=lambda item: entries[item[0]].start)
    with SharedReader(sharing) as reader:
        for section, done, total in in_sections(parameters, lambda item: entries[item[0]].size):
            with reader.in_step():
                for name, parameter in section:
                    reader.read_into(parameter, entries[name], holders=sharing.everyone)
            milestone(done, total, reader.error)
        vae.arrange_weights()
        vae.eval()
        return reader.bytes_read
