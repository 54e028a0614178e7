"""How numbers are stored: the plain types with their names and sizes, and quantised forms, which pack several values.

Source: safetensors format description; torch's names; ggml's block layouts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtype:
    """name: as torch has it. code: as safetensors files, and GGUF's for floats, have it. bytes: of one value."""

    name: str
    code: str
    bytes: int


DTYPES = tuple(
    Dtype(name=name, code=code, bytes=size)
    for name, code, size in (
        ("float64", "F64", 8),
        ("float32", "F32", 4),
        ("float16", "F16", 2),
        ("bfloat16", "BF16", 2),
        ("float8_e4m3fn", "F8_E4M3", 1),
        ("float8_e5m2", "F8_E5M2", 1),
        ("int64", "I64", 8),
        ("int32", "I32", 4),
        ("int16", "I16", 2),
        ("int8", "I8", 1),
        ("uint8", "U8", 1),
        ("bool", "BOOL", 1),
        ("uint16", "U16", 2),
        ("uint32", "U32", 4),
        ("uint64", "U64", 8),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
        ("float8_e8m0fnu", "F8_E8M0", 1),
        ("complex64", "C64", 8),
    )
)
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_CODE = {dtype.code: dtype for dtype in DTYPES}

COMPUTED = ("float32", "bfloat16", "float16")
"""Names of those that a model can be computed in."""
FLOATS = tuple(BY_NAME[name].code for name in ("float32", "float16", "bfloat16"))
WIDE_FLOATS = (*FLOATS, "F64")
"""What a plain weight may be stored in."""
FP8 = ("F8_E4M3", "F8_E5M2")

COMPLEX = "C64"

BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""GGUF's quantised types: how many values of a row take how many bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """`items` consecutive values of a row take `size` bytes, and only all of them can be unpacked.

    encoding: a key of PACKINGS. is_scaled: by one number for the whole weight as well.
    """

    encoding: str
    items: int
    size: int
    is_scaled: bool = False

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many values, which begin with a block."""
        return -(-columns // self.items) * self.size

    def covering(self, start: int, stop: int) -> range:
        """The blocks of a row in which its values start..stop-1 lie."""
        return range(start // self.items, -(-stop // self.items))

    def most_bytes(self, columns: int, *, parts: int) -> int:
        """Bytes of a row's part where `parts` ranks share its columns evenly: the part that touches most blocks."""
        part = columns // parts
        starts = range(0, part * parts, part)
        return max(len(self.covering(start, start + part)) for start in starts) * self.size


PACKINGS = {
    encoding: Packing(encoding=encoding, items=items, size=size)
    for encoding, (items, size) in (
        *((code, (1, BY_CODE[code].bytes)) for code in (*WIDE_FLOATS, *FP8)),
        *BLOCKS.items(),
    )
}
"""Everything that a transformer's weights may be stored in."""
