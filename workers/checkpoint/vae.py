"""Load a VAE file whole onto one device."""

from __future__ import annotations

import torch
from accelerate import init_empty_weights

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.model_file.header import read_model_file
from workers.vae.wan22 import VAEConfig, WanVAE, expected_shapes

from .allocate import allocate_parameters
from .reader import TORCH_TYPES, TensorReader


def load_vae(path: str, *, dtype: torch.dtype, device: torch.device) -> tuple[WanVAE, int]:
    """The VAE in `path` and the bytes read. Official names. Raises ModelFileError."""
    entries = read_model_file(path).entries
    config = VAEConfig.from_shapes({name: entry.shape for name, entry in entries.items()})
    for name, want in expected_shapes(config).items():
        if name not in entries:
            raise ModelFileError(
                f"{path} lacks the tensor {name}; the file is incomplete: download it again"
            )
        entry = entries[name]
        if entry.shape != want or entry.dtype not in TORCH_TYPES:
            raise ModelFileError(
                f"{path}: {name} is {entry.dtype} {list(entry.shape)}; it must be {list(want)} in "
                f"{', '.join(TORCH_TYPES)}"
            )
    with init_empty_weights(include_buffers=True):
        vae = WanVAE(config)
    allocate_parameters(vae, dtype_of=lambda _: dtype, device=device)
    with TensorReader() as reader:
        for name, parameter in vae.named_parameters():
            reader.read_into(parameter, entries[name])
        vae.arrange_weights()
        return vae.eval(), reader.bytes_read
