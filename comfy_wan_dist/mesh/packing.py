"""How many bytes a weight takes that stays in memory as a quantised file has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """`items` consecutive values of a row take `size` bytes, and only all of them can be unpacked.

    encoding: how, by its name in model_file/encoding.py. is_scaled: by one number for the whole weight as well.
    """

    encoding: str
    items: int
    size: int
    is_scaled: bool = False

    def row_bytes(self, columns: int) -> int:
        """Of a row of so many values, which begin with a block."""
        return -(-columns // self.items) * self.size

    def covering(self, start: int, stop: int) -> range:
        """The blocks of a row in which its values start..stop-1 lie."""
        return range(start // self.items, -(-stop // self.items))

    def most_bytes(self, columns: int, *, parts: int) -> int:
        """Of a row of one of `parts` ranks that share its columns evenly; the one whose cuts cover most blocks."""
        part = columns // parts
        starts = range(0, part * parts, part)
        return max(len(self.covering(start, start + part)) for start in starts) * self.size
