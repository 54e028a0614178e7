"""Types of numbers: what they are called here and in torch, in safetensors files, and how long they are."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtype:
    """name: torch's. code: that of safetensors and GGUF files."""

    name: str
    code: str
    bytes: int


FLOAT32 = Dtype(name="float32", code="F32", bytes=4)
BFLOAT16 = Dtype(name="bfloat16", code="BF16", bytes=2)
FLOAT16 = Dtype(name="float16", code="F16", bytes=2)
FLOAT64 = Dtype(name="float64", code="F64", bytes=8)
COMPUTE = (FLOAT32, BFLOAT16, FLOAT16)
"""What a model may be computed in, and the floats that a transformer may be stored in."""
FLOATS = (FLOAT32, FLOAT16, BFLOAT16, FLOAT64)
"""What is read value by value, and so may be stored in more types than a transformer's weights."""
FP8 = (
    Dtype(name="float8_e4m3fn", code="F8_E4M3", bytes=1),
    Dtype(name="float8_e5m2", code="F8_E5M2", bytes=1),
)
BYTE = Dtype(name="uint8", code="U8", bytes=1)
INT32 = Dtype(name="int32", code="I32", bytes=4)
INT64 = Dtype(name="int64", code="I64", bytes=8)
INTEGERS = (
    INT64,
    INT32,
    Dtype(name="int16", code="I16", bytes=2),
    Dtype(name="int8", code="I8", bytes=1),
    BYTE,
    Dtype(name="bool", code="BOOL", bytes=1),
    Dtype(name="uint16", code="U16", bytes=2),
    Dtype(name="uint32", code="U32", bytes=4),
    Dtype(name="uint64", code="U64", bytes=8),
)

OFFERED = (AUTO, "bfloat16", "float16", "float32")
"""What a node may be asked for, in the order of its list."""
DTYPE_BYTES = {dtype.name: dtype.bytes for dtype in COMPUTE}
FLOAT_CODES = tuple(dtype.code for dtype in FLOATS)
COMPUTE_CODES = tuple(dtype.code for dtype in COMPUTE)
ITEM_BYTES = {
    dtype.code: dtype.bytes for dtype in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16, *FP8, *INTEGERS)
}
"""Bytes of one value of every type that a safetensors file may name."""


def require_compute_dtype(name: str) -> None:
    """Raises ConfigError for what no model is computed in."""
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {name!r} is not known; use {', '.join(DTYPE_BYTES)}")


def compute_dtype(asked: str, *, is_cuda: bool, code: str) -> str:
    """What `asked` is; `auto` is bfloat16 on CUDA, on the CPU the type that a file stores as `code`.

    Raises ConfigError.
    """
    if asked not in OFFERED:
        raise ConfigError(f"dtype {asked!r} is not known; choose {', '.join(OFFERED)}")
    if asked != AUTO:
        return asked
    stored = {dtype.code: dtype.name for dtype in COMPUTE}.get(code, "float32")
    return "bfloat16" if is_cuda else stored
