"""The header of safetensors files, read with distrust.

A file is accepted only when its tensors lie inside it, without overlap and without gaps, as the format demands and the
`safetensors` package checks; a truncated or forged file fails here, before memory is allocated. The header is parsed
again for what the package does not tell: where tensors lie. Which files a model has is files.py's business, and what
GGUF files say is gguf.py's.
Source: safetensors format description (u64 header length, JSON header, tensor bytes).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..ipc.errors import ModelFileError
from ..mesh.dtypes import BY_CODE
from .encoding import TensorEntry
from .files import GGUF_SUFFIX, files_of
from .gguf import MAX_TENSORS, MAX_TEXT_BYTES, read_gguf_header
from .names import shown

# Far more than the header of any model, and little enough to be parsed in memory.
MAX_HEADER_BYTES = 32 * 2**20
MAX_DIMS = 16
PIECE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFile:
    """All tensors of a model, by name, and the files that hold them. metadata: texts beside the tensors.

    mtime_ns: when it was changed; of several files the sum, which any of them changes.
    """

    path: str
    entries: Mapping[str, TensorEntry]
    file_bytes: int
    mtime_ns: int
    metadata: Mapping[str, str] = field(default_factory=dict)


def read_model_file(path: str, *, component: str = "transformer") -> ModelFile:
    """Read the model at `path`: a safetensors or GGUF file, any shard of several, or a folder as files.py has it.

    component: which subfolder is meant of a folder of diffusers. The result's path leads to the same files.
    Raises ModelFileError: unreadable, neither of them, truncated, overlapping, or a missing shard.
    """
    stands_for_all, files = files_of(Path(path), component=component)
    entries: dict[str, TensorEntry] = {}
    file_bytes = 0
    mtime_ns = 0
    metadata: dict[str, str] = {}
    gguf_keys: dict[str, Any] = {}
    for file in files:
        try:
            status = file.stat()
            if file.suffix == GGUF_SUFFIX:
                tensors = read_gguf_header(file, gguf_keys, parts=len(files))
            else:
                tensors, texts = _read_header(file)
                metadata.update(texts)
        except OSError as error:
            raise ModelFileError(
                f"{file.name} cannot be read: {error.strerror or error}"
            ) from error
        if twice := entries.keys() & tensors.keys():
            raise ModelFileError(
                f"{file.name} repeats the tensor {shown(min(twice))} of another shard; download it again"
            )
        entries.update(tensors)
        file_bytes += status.st_size
        mtime_ns += status.st_mtime_ns
    return ModelFile(
        path=str(stands_for_all),
        entries=entries,
        file_bytes=file_bytes,
        mtime_ns=mtime_ns,
        metadata=metadata,
    )


def content_of(file: ModelFile) -> str:
    """Digest of the tensors' names, types and shapes, of a piece out of the middle of each matrix, and of scalars.

    Two trainings of one model, and a file whose room was taken before its bytes came, have the same size and layout.
    Some hundred small reads. Raises ModelFileError.
    """
    digest = hashlib.sha256()
    entries = sorted(file.entries.items(), key=lambda item: (item[1].path, item[1].start))
    try:
        for path, inside in itertools.groupby(entries, key=lambda item: item[1].path):
            with open(path, "rb") as opened:
                for name, entry in inside:
                    digest.update(f"{name!a} {entry.dtype} {entry.shape}\n".encode())
                    if not len(entry.shape) < 2 < prod(entry.shape):
                        start = entry.start + max(0, entry.size - PIECE_BYTES) // 2
                        size = min(entry.size, PIECE_BYTES)
                        digest.update(os.pread(opened.fileno(), size, start))
    except OSError as error:
        raise ModelFileError(
            f"{Path(file.path).name} cannot be read: {error.strerror or error}"
        ) from error
    return digest.hexdigest()


def _read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tensors and metadata."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file, safe_open(path, framework="numpy") as checked:
            metadata = checked.metadata() or {}
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes of {MAX_HEADER_BYTES} at most")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = {
            name: TensorEntry(
                dtype=value["dtype"],
                shape=tuple(value["shape"]),
                path=str(path),
                start=8 + length + value["data_offsets"][0],
                stop=8 + length + value["data_offsets"][1],
            )
            for name, value in header.items()
        }
    # The package takes an entry that is a list, too; and the file may be replaced after it has looked.
    except (
        SafetensorError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ModelFileError(
            f"{path.name}, of {size} bytes, is truncated, damaged or no safetensors file ({shown(str(error))}); "
            "download it again"
        ) from error
    if len(entries) > MAX_TENSORS:
        raise ModelFileError(
            f"{path.name} has {len(entries)} tensors, and no model more than {MAX_TENSORS}; choose another file"
        )
    for name, entry in entries.items():
        if len(name) > MAX_TEXT_BYTES or len(entry.shape) > MAX_DIMS:
            raise ModelFileError(
                f"{path.name} has a name of {len(name)} characters and {len(entry.shape)} dims, {shown(name)}; there "
                f"may be {MAX_TEXT_BYTES} and {MAX_DIMS}: choose another file"
            )
        if entry.dtype not in BY_CODE:
            raise ModelFileError(
                f"{path.name}: {shown(name)} has the type {shown(entry.dtype)}, which is not known; known are "
                f"{', '.join(BY_CODE)}"
            )
    return entries, metadata
