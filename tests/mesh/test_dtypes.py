"""The table of number types: equal to torch's and to what safetensors writes, and what the loader's list offers."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save

from comfy_wan_dist.ipc import shared
from comfy_wan_dist.jobs.handle import DTYPES as OFFERED
from comfy_wan_dist.mesh.dtypes import (
    BLOCKS,
    BY_NAME,
    COMPUTED,
    DTYPES,
    FLOATS,
    FP8,
    PACKINGS,
    WIDE_FLOATS,
    Dtype,
)
from workers.model.dtypes import dtype_coded, dtype_named


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_table_agrees_with_torch_and_safetensors(dtype: Dtype) -> None:
    kind = dtype_named(dtype.name)
    assert dtype_coded(dtype.code) is kind
    assert str(kind) == f"torch.{dtype.name}"
    assert kind.itemsize == dtype.bytes
    raw = save({"x": torch.zeros(3, dtype=torch.uint8).to(kind)})
    (length,) = struct.unpack("<Q", raw[:8])
    assert json.loads(raw[8 : 8 + length])["x"]["dtype"] == dtype.code


def test_lists_that_derive_from_the_table() -> None:
    assert OFFERED == ("auto", "bfloat16", "float16", "float32")
    assert COMPUTED == ("float32", "bfloat16", "float16")
    assert FLOATS == ("F32", "F16", "BF16")
    assert WIDE_FLOATS == ("F32", "F16", "BF16", "F64")
    assert tuple(PACKINGS) == (*WIDE_FLOATS, *FP8, *BLOCKS)
    assert {shared.DTYPES[name].itemsize for name in COMPUTED} == {4, 2}
    for name, dtype in shared.DTYPES.items():
        assert dtype.itemsize == BY_NAME[name].bytes
