"""The header of safetensors files, read with distrust.

A file is accepted only when its tensors lie inside it, without overlap and without gaps, as the format demands; a
truncated or forged file fails here, before memory is allocated. It is read and never mapped: a file that shrinks
meanwhile, or a disk that fails, would end the process. Which files a model has is files.py's business, and what GGUF
files say is gguf.py's.
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
from typing import Any, BinaryIO

from ..ipc.errors import ModelFileError
from ..mesh.dtypes import BY_CODE
from .encoding import TensorEntry
from .files import GGUF_SUFFIX, files_of, has_suffix
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
    tensors: Mapping[str, TensorEntry]
    metadata: dict[str, str] = {}
    gguf_keys: dict[str, Any] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                status = os.fstat(opened.fileno())
                if has_suffix(file.name, GGUF_SUFFIX):
                    header = read_gguf_header(
                        opened, file, status.st_size, parts=len(files), before=gguf_keys
                    )
                    tensors = header.entries
                    gguf_keys.update(header.keys)
                else:
                    tensors, texts = _read_header(opened, file, status.st_size)
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


def _read_header(
    file: BinaryIO, path: Path, file_bytes: int
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tensors and metadata."""
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ModelFileError(f"{path.name} has only {len(prefix)} bytes; download it again")
    length = int.from_bytes(prefix, "little")
    if length > min(file_bytes - 8, MAX_HEADER_BYTES):
        raise ModelFileError(
            f"{path.name} says that its header has {length} bytes, but the file has {file_bytes} "
            f"(headers may have {MAX_HEADER_BYTES}); it is truncated or no safetensors file"
        )
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"the header of {path.name} is not JSON; it is damaged or no safetensors file"
        ) from error
    if not isinstance(header, dict):
        raise ModelFileError(
            f"the header of {path.name} is not a JSON object; it is no safetensors file"
        )
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        metadata = {}
    if len(header) > MAX_TENSORS:
        raise ModelFileError(
            f"{path.name} has {len(header)} tensors, and no model more than {MAX_TENSORS}; choose another file"
        )
    if too_long := next((name for name in header if len(name) > MAX_TEXT_BYTES), None):
        raise ModelFileError(
            f"{path.name} has a name of {len(too_long)} characters, {shown(too_long)}, and may have {MAX_TEXT_BYTES}; "
            "it is damaged: download it again"
        )
    data_start = 8 + length
    entries = {name: _entry(name, value, path, data_start) for name, value in header.items()}
    _require_exact_cover(entries, path, data_start, file_bytes)
    return entries, metadata


def _entry(name: str, value: Any, path: Path, data_start: int) -> TensorEntry:
    def whole(number: Any) -> bool:
        return type(number) is int and 0 <= number < 2**62

    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ModelFileError(
            f"{path.name}: the header entry of {shown(name)} is incomplete; the file is damaged"
        ) from error
    if not isinstance(dtype, str) or dtype not in BY_CODE:
        raise ModelFileError(
            f"{path.name}: {shown(name)} has the type {shown(dtype)}, which is not known; known are "
            f"{', '.join(BY_CODE)}"
        )
    well_formed = (
        isinstance(shape, list)
        and len(shape) <= MAX_DIMS
        and all(map(whole, [*shape, start, stop]))
    )
    if not well_formed or stop - start != prod(shape) * BY_CODE[dtype].bytes:
        raise ModelFileError(
            f"{path.name}: {shown(name)} has shape {shown(shape)} and type {dtype}, which do not give its bytes "
            f"{shown(start)}..{shown(stop)}; the file is damaged"
        )
    return TensorEntry(
        dtype=dtype,
        shape=tuple(shape),
        path=str(path),
        start=data_start + start,
        stop=data_start + stop,
    )


def _require_exact_cover(
    entries: Mapping[str, TensorEntry], path: Path, data_start: int, file_bytes: int
) -> None:
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            kind = (
                "overlaps the tensor before it"
                if entry.start < position
                else "leaves a gap before it"
            )
            raise ModelFileError(f"{path.name}: {shown(name)} {kind}; the file is damaged")
        position = entry.stop
    if position != file_bytes:
        raise ModelFileError(
            f"{path.name} has {file_bytes} bytes but its header describes {position}; "
            "it is truncated or damaged: download it again"
        )
