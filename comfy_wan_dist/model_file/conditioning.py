"""A prompt's embedding in a file: safetensors with `cond` [1, S, 4096] float32 and a version in its metadata."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..ipc.errors import ModelFileError

TEXT_DIM = 4096
VERSION_KEY = "wan_dist_conditioning"
VERSION = "1"


def save(path: Path, embedding: Tensor) -> None:
    """Write `embedding` [1, S, 4096]. Raises ModelFileError."""
    tensors = {"cond": embedding.to(torch.float32).contiguous()}
    try:
        save_file(tensors, path, metadata={VERSION_KEY: VERSION})
    except (SafetensorError, OSError, UnicodeError) as error:
        raise ModelFileError(
            f"{path.name!r:.80} cannot be written: {error}; choose another name, or make room on the disk"
        ) from error


def load(path: Path) -> Tensor:
    """Read what `save` wrote; [1, S, 4096] float32. Raises ModelFileError for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            version = (file.metadata() or {}).get(VERSION_KEY)
            if version != VERSION:
                raise ModelFileError(
                    f"{path.name} is no conditioning file of version {VERSION} (its version: {version}); "
                    "choose a file that Wan Dist Save Conditioning wrote"
                )
            embedding: Tensor = file.get_tensor("cond")
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{path.name} cannot be read as a conditioning file: {error}"
        ) from error
    if embedding.dim() != 3 or embedding.shape[0] != 1 or embedding.shape[-1] != TEXT_DIM:
        raise ModelFileError(
            f"{path.name} holds an embedding of shape {list(embedding.shape)}; it must be [1, tokens, {TEXT_DIM}]: "
            "save it again with Wan Dist Save Conditioning"
        )
    return embedding.float()
