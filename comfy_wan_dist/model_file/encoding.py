"""Where a parameter's bytes lie in a file, and how its values follow from them.

Covers floats of 16 bits and more, fp8 with or without a scale, and GGUF's blocks.

A scaled fp8 weight `X.weight` has a companion, in the older form `X.scale_weight` and a tensor `scaled_fp8` that marks
the file, in the newer one `X.weight_scale` and the format's name, in `X.comfy_quant` or in the file's metadata. Scales
of inputs, and whether products should be exact, do not matter here: products are computed in the model's dtype. In the
older form a scale may be missing, and is 1 then, or belong to a weight of another type than `scaled_fp8` has, to which
ComfyUI rounds it.
Not covered: values are not read here, so that a scale is checked when it is loaded.
Source: ComfyUI's QUANTIZATION.md and loader (0.3.75); ggml's block layouts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..ipc.errors import ModelFileError
from ..mesh.dtypes import (
    BLOCKS,
    BY_CODE,
    BY_NAME,
    COMPLEX,
    FLOATS,
    FP8,
    PACKINGS,
    WIDE_FLOATS,
    Packing,
)
from .names import Naming, shown

FORMATS = tuple(BY_CODE[code].name for code in FP8)
"""That newer files name: the dtypes that their weights must have."""
METADATA_KEY = "_quantization_metadata"
FORMATS_OF_MODELOPT = {"fp8": "float8_e4m3fn"}
MAX_FORMAT_BYTES = 4096

SCALES = ("scale_weight", "weight_scale")
IGNORED = ("scale_input", "input_scale")
UNKNOWN = ("weight_scale_2", "pre_quant_scale")
COMPANIONS = (*SCALES, *IGNORED, *UNKNOWN, "comfy_quant")
"""What may stand beside a layer's weight and bias, after the layer's name and a dot."""
MARKER = "scaled_fp8"

REMEDY = "choose an fp8 (e4m3fn or e5m2), GGUF, 16- or 32-bit file"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A parameter: its bytes, and the scale that its values are still to be multiplied with.

    rounded_to: the dtype of safetensors that they are rounded to before, or None.
    """

    entry: TensorEntry
    scale: TensorEntry | None = None
    rounded_to: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def packing(self) -> Packing:
        packing = PACKINGS[self.entry.dtype]
        return packing if self.scale is None else replace(packing, is_scaled=True)

    @property
    def is_packed(self) -> bool:
        """Whether it stays in memory as it is in the file: every quantised matrix of a linear, unless it is rounded."""
        is_quantised = len(self.shape) == 2 and self.entry.dtype not in WIDE_FLOATS
        return is_quantised and self.rounded_to is None

    @property
    def as_bytes(self) -> TensorEntry:
        """A matrix whose rows are taken as bytes."""
        rows, columns = self.shape
        return replace(self.entry, dtype="U8", shape=(rows, self.packing.row_bytes(columns)))


def read_encodings(
    entries: Mapping[str, TensorEntry], *, layers: Mapping[str, str], label: str
) -> dict[str, StoredTensor]:
    """Every tensor that is no companion of another one, with its scale.

    layers: format of each layer that the file's metadata names (`layer_formats`). label: the file, for messages.
    Raises ModelFileError naming a format that is not supported, or a scale that is missing or odd.
    """
    marked = _marked_dtype(entries, label)
    companions = {name for name in entries if name.rpartition(".")[2] in COMPANIONS}
    formats = {**layers, **_formats_beside(entries, label)}
    stored = {}
    for name, entry in entries.items():
        if name == MARKER or name in companions:
            continue
        layer, _, leaf = name.rpartition(".")
        scale = None
        if leaf == "weight":
            named = formats.get(layer) or _guess_format(layer, entry, entries)
            if named is not None and (named not in FORMATS or BY_NAME[named].code != entry.dtype):
                raise ModelFileError(
                    f"{label} stores {shown(name)} as {shown(named)} in {entry.dtype}, which is not supported; {REMEDY}"
                )
            scale = _scale_of(layer, entries, label)
            if scale is None and layer in formats and len(entry.shape) == 2:
                raise ModelFileError(
                    f"{label}: the scaled weight {shown(name)} has no scale beside it "
                    f"({' or '.join(SCALES)}); the file is incomplete: download it again"
                )
            scalable = FP8 if marked is None else (*FP8, *WIDE_FLOATS)
            if scale is not None and (entry.dtype not in scalable or len(entry.shape) != 2):
                raise ModelFileError(
                    f"{label}: {shown(name)} is {entry.dtype} {list(entry.shape)} and has a scale, which only "
                    f"matrices in fp8 may have; {REMEDY}"
                )
        _require_supported(name, entry, label)
        rounded_to = None if scale is None else _rounded_to(entry.dtype, marked)
        stored[name] = StoredTensor(entry=entry, scale=scale, rounded_to=rounded_to)
    if astray := sorted(n for n in companions if n.rpartition(".")[0] + ".weight" not in stored):
        raise ModelFileError(
            f"{label} has {shown(astray[0])} without the weight that it belongs to; the file is incomplete: "
            "download it again"
        )
    return stored


def _marked_dtype(entries: Mapping[str, TensorEntry], label: str) -> str | None:
    """The dtype in which ComfyUI has the weights of an older scaled file, or None for another file."""
    marker = entries.get(MARKER)
    if marker is None:
        return None
    if marker.dtype not in (*FP8, *WIDE_FLOATS):
        raise ModelFileError(
            f"{label} has {shown(MARKER)} as {marker.dtype}, which says of no float what the weights are; {REMEDY}"
        )
    return FP8[0] if marker.dtype == "F32" else marker.dtype


def _rounded_to(dtype: str, marked: str | None) -> str | None:
    """The dtype to which values of `dtype` are rounded, or None if they are kept as they are."""
    is_kept = marked in (None, dtype, "F64") or (dtype in FP8 and marked in FLOATS)
    return None if is_kept else marked


def layer_formats(metadata: Mapping[str, str], naming: Naming, *, label: str) -> dict[str, str]:
    """Format of each layer that a file's metadata names, by its official name. Raises ModelFileError."""
    raw = metadata.get(METADATA_KEY)
    if raw is None:
        return {}
    try:
        layers = json.loads(raw)["layers"]
        # ComfyUI names layers without the prefix that the tensors may have.
        return {naming.official(name) or name: _format_name(conf) for name, conf in layers.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFileError(
            f"the {METADATA_KEY} of {label} cannot be read; the file is damaged: download it again"
        ) from error


def _formats_beside(entries: Mapping[str, TensorEntry], label: str) -> dict[str, str]:
    """Formats that `X.comfy_quant` tensors name: JSON, as bytes."""
    formats = {}
    for name, entry in entries.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "comfy_quant":
            continue
        try:
            if entry.dtype != "U8" or entry.size > MAX_FORMAT_BYTES:
                raise ValueError("no short text")
            formats[layer] = _format_name(json.loads(read_bytes(entry)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelFileError(
                f"{label}: {shown(name)} is not the JSON of a format; the file is damaged: download it again"
            ) from error
    return formats


def _format_name(conf: Any) -> str:
    name = conf["format"] if isinstance(conf, dict) else conf
    if not isinstance(name, str):
        raise TypeError("a format's name is text")
    return FORMATS_OF_MODELOPT.get(name, name)


def read_bytes(entry: TensorEntry) -> bytes:
    """The bytes of a small tensor. Raises ModelFileError."""
    name = os.path.basename(entry.path)
    try:
        with open(entry.path, "rb") as file:
            raw = os.pread(file.fileno(), entry.size, entry.start)
    except OSError as error:
        raise ModelFileError(f"{name} cannot be read: {error.strerror or error}") from error
    if len(raw) < entry.size:
        raise ModelFileError(f"{name} became shorter while it was read; load it again")
    return raw


def _guess_format(layer: str, entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> str | None:
    """Name of a format that is known only to be refused, and that the file does not name."""
    if f"{layer}.weight_scale_2" in entries:
        return "nvfp4"
    if f"{layer}.pre_quant_scale" in entries:
        return "a format with scales of inputs"
    return "int8" if entry.dtype == "I8" else None


def _scale_of(layer: str, entries: Mapping[str, TensorEntry], label: str) -> TensorEntry | None:
    found = [name for leaf in SCALES if (name := f"{layer}.{leaf}") in entries]
    if not found:
        return None
    scale = entries[found[0]]
    if len(found) > 1:
        raise ModelFileError(
            f"{label} has both {shown(found[0])} and {shown(found[1])}; it is damaged: download it again"
        )
    if any(size != 1 for size in scale.shape) or scale.dtype == COMPLEX:
        raise ModelFileError(
            f"{label}: the scale {shown(found[0])} is {scale.dtype} {list(scale.shape)}; only one number for the "
            f"whole weight is supported, so {REMEDY}"
        )
    return scale


def _require_supported(name: str, entry: TensorEntry, label: str) -> None:
    if entry.dtype not in PACKINGS:
        raise ModelFileError(
            f"{label} stores {shown(name)} as {entry.dtype}, which is not supported; {REMEDY}"
        )
    if entry.dtype not in BLOCKS:
        return
    items, _ = BLOCKS[entry.dtype]
    if len(entry.shape) == 2 and entry.shape[1] % items:
        raise ModelFileError(
            f"{label} stores {shown(name)} {list(entry.shape)} as {entry.dtype}, whose blocks of {items} values "
            f"suit only matrices with rows of whole blocks; {REMEDY}"
        )


def packed_weights(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Packing]]:
    """What stays in memory as the file has it: the quantised weights of linears."""
    return (
        (name, tensor.packing)
        for name, tensor in stored.items()
        if tensor.is_packed and name.endswith(".weight")
    )
