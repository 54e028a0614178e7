"""Where a tensor lies in a file, whatever the file's format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes start..stop-1 of file `path`, row-major.

    dtype: of safetensors or GGUF; a GGUF's quantised types pack blocks of a row's values. shape: in values.
    """

    dtype: str
    shape: tuple[int, ...]
    path: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start
