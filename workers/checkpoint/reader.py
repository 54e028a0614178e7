"""Read tensors, or slices of them, from model files straight into memory that is already there.

Reads go through `os.preadv` into the parameter's storage, or through one small buffer where the type, the device
or the cut's dim differ; a memory-mapped file would hide both the bytes read and the memory used.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.model_file.encoding import TensorEntry
from workers.model.dtypes import dtype_coded

BUFFER_BYTES = 16 * 2**20


class TensorReader:
    """Open files of one load. Use as a context manager; `bytes_read` counts what was asked of them."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[str, int] = {}
        self._buffer = bytearray()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read_into(
        self,
        target: Tensor,
        entry: TensorEntry,
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> None:
        """Fill `target` (contiguous; any type and device) with the entry, or with some of its rows and columns.

        Only the bytes of `rows` are read; of columns it passes over whole rows. Raises ModelFileError.
        """
        start = entry.start
        if rows is not None:
            start += rows.start * (entry.size // entry.shape[0])
        if columns is None:
            self._read_rows(target.view(-1), entry, start)
        else:
            self._read_columns(target, entry, start, columns)

    def _read_rows(self, flat: Tensor, entry: TensorEntry, start: int) -> None:
        dtype = dtype_coded(entry.dtype)
        if flat.device.type == "cpu" and flat.dtype == dtype and flat.numel():
            self._pread(entry.path, memory_of(flat), start)
            return
        items = BUFFER_BYTES // dtype.itemsize
        for first in range(0, flat.numel(), items):
            piece = flat[first : first + items]
            piece.copy_(self._buffered(entry, start + first * dtype.itemsize, piece.numel()))

    def _read_columns(self, target: Tensor, entry: TensorEntry, start: int, part: range) -> None:
        rows, columns = target.shape[0], entry.shape[1]
        itemsize = dtype_coded(entry.dtype).itemsize
        at_once = max(1, BUFFER_BYTES // (columns * itemsize))
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            whole = self._buffered(entry, start + first * columns * itemsize, count * columns)
            target[first : first + count] = whole.view(count, columns)[:, part.start : part.stop]

    def _buffered(self, entry: TensorEntry, start: int, items: int) -> Tensor:
        dtype = dtype_coded(entry.dtype)
        size = items * dtype.itemsize
        if size > len(self._buffer):
            self._buffer = bytearray(max(size, BUFFER_BYTES))
        self._pread(entry.path, memoryview(self._buffer)[:size], start)
        return torch.frombuffer(self._buffer, dtype=dtype, count=items)

    def _pread(self, path: str, target: memoryview, start: int) -> None:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ModelFileError(f"{path} cannot be opened: {error.strerror}") from error
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self._files[path], [target[done:]], start + done)
            except OSError as error:
                raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
            if got == 0:
                raise ModelFileError(f"{path} became shorter while it was read; load it again")
            done += got
            self.bytes_read += got


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must outlive it. NumPy would forbid to move the storage later."""
    bytes_of_it = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(bytes_of_it).cast("B")
