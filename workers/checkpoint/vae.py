"""Load a VAE file whole onto each device of a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights

from comfy_wan_dist.model_file.encoding import TensorEntry
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.vae import read_vae_file
from comfy_wan_dist.model_file.vae_names import official_vae_tensors
from workers.parallel.parallelize import allocate_parameters
from workers.vae.wan22 import WanVAE

from .sharing import Milestone, ReadGroups, SharedReader, in_sections


def vae_bytes(path: str, *, dtype: torch.dtype) -> int:
    """What the weights of the VAE in `path` take. Raises ModelFileError."""
    entries = official_vae_tensors(read_model_file(path).entries, label=Path(path).name)
    return sum(math.prod(entry.shape) for entry in entries.values()) * dtype.itemsize


def build_vae(
    path: str, *, dtype: torch.dtype, device: torch.device
) -> tuple[WanVAE, Mapping[str, TensorEntry]]:
    """The VAE in `path` without values, and where they are. Raises ModelFileError."""
    file = read_vae_file(read_model_file(path))
    with init_empty_weights(include_buffers=True):
        vae = WanVAE(file.config)
    allocate_parameters(vae, dtype_of=lambda _: dtype, device=device)
    return vae, file.entries


def load_vae_weights(
    vae: WanVAE,
    entries: Mapping[str, TensorEntry],
    *,
    sharing: ReadGroups,
    milestone: Milestone,
) -> int:
    """Stream the values in; returns the bytes asked of the file. All ranks of `sharing.everyone` hold the VAE.

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
