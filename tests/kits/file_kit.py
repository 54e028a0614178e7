"""Model files by hand: headers, right or wrong, and what is said of files that are refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.dtypes import BY_CODE
from comfy_wan_dist.mesh.shape import WanShape

SHAPE = WanShape(dim=128, ffn_dim=64, num_layers=2, in_dim=48, out_dim=48, text_dim=16, freq_dim=8)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.floats()
    | st.sampled_from([*BY_CODE, "F99", ""]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
"""What JSON may have where a header has something."""


def write_raw(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with this header (JSON unless bytes), telling `length` as its length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def tensor(
    start: int, stop: int, *, dtype: str = "U8", shape: list[int] | None = None
) -> dict[str, Any]:
    """Its entry in a header."""
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def refusal(action: Callable[[], object], *, most: int = 400) -> str:
    """The message of the ModelFileError that `action` raises: one line, not too short and not over `most`."""
    with pytest.raises(ModelFileError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < most
    return message
