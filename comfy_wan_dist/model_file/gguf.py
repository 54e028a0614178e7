"""The header of GGUF files, read with distrust, as header.py reads those of safetensors.

Counts, lengths and places are checked before anything is done with them: at most MAX_TENSORS tensors and MAX_VALUES
keys and texts are looked at, and a text is read only if it is short. The `gguf` package's own reader believes them: a
forged count keeps it busy for as long as the count says.
Not covered: big-endian files, and version 1.
Source: ggml's GGUF specification, and ComfyUI-GGUF for a tensor's shape before it was flattened.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ..ipc.errors import ModelFileError
from ..mesh.dtypes import PACKINGS
from .encoding import TensorEntry
from .names import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 2**16
MAX_VALUES = 2**20
MAX_TEXT_BYTES = 2**10
MAX_DIMS = 8
DEFAULT_ALIGNMENT = 32

TYPES = {
    number: name
    for first, names in (
        (0, ("F32", "F16", "Q4_0", "Q4_1")),
        (6, ("Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K")),
        (16, ("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS")),
        (24, ("I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16")),
        (34, ("TQ1_0", "TQ2_0")),
        (39, ("MXFP4", "NVFP4")),
    )
    for number, name in enumerate(names, first)
}
"""By ggml's numbers. Those that are no PACKINGS are here only to be refused by name."""

SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""Kind of a value -> its code in struct."""
TEXT, ARRAY = 8, 9

WANTED = ("general.alignment", "split.count")
SHAPE_PREFIX = "comfy.gguf.orig_shape."


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """entries: tensors with their shapes in values, rows first. keys: those that count, with their values."""

    entries: Mapping[str, TensorEntry]
    keys: Mapping[str, Any]


def read_gguf_header(
    file: BinaryIO, path: Path, file_bytes: int, *, parts: int, before: Mapping[str, Any]
) -> GgufHeader:
    """The header of one of so many parts. Raises ModelFileError, and OSError.

    before: keys of the parts before this one, which count for it too.
    """
    return _Header(file, path, file_bytes, parts).read(before)


@dataclass(slots=True)
class _Header:
    file: BinaryIO
    path: Path
    file_bytes: int
    parts: int
    values: int = 0

    def read(self, before: Mapping[str, Any]) -> GgufHeader:
        magic = self._take(4)
        if magic != MAGIC:
            raise self._damaged("does not begin like a GGUF file")
        (version,) = self._unpack("I")
        if version not in VERSIONS:
            raise ModelFileError(
                f"{self.path.name} is GGUF version {version}; versions 2 and 3, little-endian, are supported: convert "
                "it again with a current tool"
            )
        tensors, keys = self._unpack("QQ")
        if tensors > MAX_TENSORS or keys > MAX_TENSORS:
            raise self._damaged(f"says that it has {tensors} tensors and {keys} keys")
        found = {
            key: value for key, value in (self._key() for _ in range(keys)) if value is not None
        }
        if (count := found.get("split.count", 1)) not in (0, 1, self.parts):
            raise ModelFileError(
                f"{self.path.name} is one part of {shown(count)} that has lost its name; name all as llama-gguf-split "
                "does, or merge them"
            )
        described = [self._tensor() for _ in range(tensors)]
        alignment = found.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"has the alignment {alignment}")
        data_start = -(-self.file.tell() // alignment) * alignment
        entries: dict[str, TensorEntry] = {}
        for name, entry in described:
            if name in entries:
                raise self._damaged(f"has the tensor {shown(name)} twice")
            placed = replace(entry, start=data_start + entry.start, stop=data_start + entry.stop)
            entries[name] = self._reshaped(name, placed, {**before, **found})
        self._require_inside(entries)
        return GgufHeader(entries=entries, keys=found)

    def _key(self) -> tuple[str, Any]:
        """A key and its value, which is None unless it is wanted."""
        key = self._text()
        (kind,) = self._unpack("I")
        return key, self._value(kind, is_wanted=key in WANTED or key.startswith(SHAPE_PREFIX))

    def _value(self, kind: int, *, is_wanted: bool) -> Any:
        if kind in SCALARS:
            (value,) = self._unpack(SCALARS[kind])
            return value if is_wanted else None
        if kind == TEXT:
            return self._text() if is_wanted else self._skip_text()
        if kind != ARRAY:
            raise self._damaged(f"has a value of the unknown kind {kind}")
        of, count = self._unpack("IQ")
        if of == TEXT:
            for _ in range(self._counted(count)):
                self._skip_text()
            return None
        if of not in SCALARS:
            raise self._damaged(f"has an array of the unknown kind {of}")
        if is_wanted and count <= MAX_DIMS:
            return self._unpack(f"{count}{SCALARS[of]}")
        self._skip(count * struct.calcsize(SCALARS[of]))
        return None

    def _tensor(self) -> tuple[str, TensorEntry]:
        """A tensor's name and entry, which counts from where the data will turn out to start."""
        name = self._text()
        (dims,) = self._unpack("I")
        if dims > MAX_DIMS:
            raise self._damaged(f"has the tensor {shown(name)} of {dims} dims")
        shape = tuple(reversed(self._unpack(f"{dims}Q")))
        number, start = self._unpack("IQ")
        dtype = TYPES.get(number, str(number))
        packing = PACKINGS.get(dtype)
        if packing is None:
            supported = [each for each in TYPES.values() if each in PACKINGS]
            raise ModelFileError(
                f"{self.path.name} stores {shown(name)} in the GGUF type {dtype}, which is not supported; "
                f"choose a file of {', '.join(supported)}"
            )
        columns = shape[-1] if shape else 1
        if columns % packing.items:
            raise self._damaged(
                f"has {shown(name)} with rows of {columns} values, which are no whole {dtype} blocks"
            )
        size = prod(shape[:-1]) * packing.row_bytes(columns)
        return name, TensorEntry(
            dtype=dtype, shape=shape, path=str(self.path), start=start, stop=start + size
        )

    def _reshaped(self, name: str, entry: TensorEntry, keys: Mapping[str, Any]) -> TensorEntry:
        shape = keys.get(SHAPE_PREFIX + name)
        if shape is None:
            return entry
        is_shape = isinstance(shape, tuple) and all(type(n) is int and n > 0 for n in shape)
        if not is_shape or prod(shape) != prod(entry.shape):
            raise self._damaged(
                f"has {shown(name)} of shape {list(entry.shape)}, which does not become {shown(shape)}"
            )
        return replace(entry, shape=shape)

    def _require_inside(self, entries: Mapping[str, TensorEntry]) -> None:
        position = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start < position:
                raise self._damaged(f"has {shown(name)} where another tensor is")
            if entry.stop > self.file_bytes:
                raise ModelFileError(
                    f"{self.path.name} has {self.file_bytes} bytes but {shown(name)} ends at {entry.stop}; it is "
                    "truncated: download it again"
                )
            position = entry.stop

    def _text(self) -> str:
        (length,) = self._unpack("Q")
        if length > MAX_TEXT_BYTES:
            raise self._damaged(f"has a name of {length} bytes")
        self._counted(1)
        return self._take(length).decode("utf-8", "replace")

    def _skip_text(self) -> None:
        (length,) = self._unpack("Q")
        self._counted(1)
        self._skip(length)

    def _counted(self, count: int) -> int:
        self.values += count
        if self.values > MAX_VALUES:
            raise self._damaged(f"has more than {MAX_VALUES} texts in its header")
        return count

    def _unpack(self, code: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))

    def _take(self, size: int) -> bytes:
        taken = self.file.read(size)
        if len(taken) < size:
            raise self._truncated()
        return taken

    def _skip(self, size: int) -> None:
        if size > self.file_bytes - self.file.tell():
            raise self._truncated()
        self.file.seek(size, os.SEEK_CUR)

    def _truncated(self) -> ModelFileError:
        return ModelFileError(
            f"{self.path.name} has only {self.file_bytes} bytes, and its header is longer; it is truncated or no GGUF "
            "file: download it again"
        )

    def _damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path.name} {what}; the file is damaged: download it again")
