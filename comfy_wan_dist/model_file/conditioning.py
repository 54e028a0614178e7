"""A prompt's embedding in a file: safetensors with `cond` [1, S, 4096] float32 and a version in its metadata."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..ipc.errors import ModelFileError
from ..mesh.dtypes import BY_CODE, FLOATS
from .encoding import read_bytes
from .header import read_model_file
from .names import shown

TEXT_DIM = 4096
VERSION_KEY = "wan_dist_conditioning"
VERSION = "1"
REMEDY = "save it again with Wan Dist Save Conditioning"


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
    """Read what `save` wrote; [1, S, 4096] float32. Raises ModelFileError for any other file.

    It is read and not mapped: ComfyUI keeps it, and would end with a file that is cut off meanwhile.
    """
    file = read_model_file(str(path))
    version = file.metadata.get(VERSION_KEY)
    if version != VERSION:
        raise ModelFileError(
            f"{path.name} is no conditioning file of version {VERSION} (its version: {shown(version)}); "
            "choose a file that Wan Dist Save Conditioning wrote"
        )
    entry = file.entries.get("cond")
    if entry is None or entry.dtype not in FLOATS:
        found = "no tensor cond" if entry is None else f"cond as {entry.dtype}"
        raise ModelFileError(
            f"{path.name} has {found}, and needs one of {', '.join(FLOATS)}; {REMEDY}"
        )
    is_embedding = len(entry.shape) == 3 and entry.shape[0] == 1 and entry.shape[-1] == TEXT_DIM
    if not is_embedding or entry.size == 0:
        raise ModelFileError(
            f"{path.name} holds an embedding of shape {list(entry.shape)}; it must be [1, tokens, {TEXT_DIM}]: {REMEDY}"
        )
    dtype = getattr(torch, BY_CODE[entry.dtype].name)
    values = torch.frombuffer(bytearray(read_bytes(entry)), dtype=dtype)
    return values.view(entry.shape).float()
