"""What is read from a model file's header, and what is refused in one sentence."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from file_kit import json_values, refusal, tensor, write_raw
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.dtypes import BY_CODE
from comfy_wan_dist.model_file.header import (
    MAX_HEADER_BYTES,
    ModelFile,
    content_of,
    read_model_file,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_entries_say_where_tensors_lie(file: Path) -> None:
    tensors = {"a": torch.arange(6).view(2, 3).half(), "b": torch.zeros(0), "c": torch.tensor(2.5)}
    save_file(tensors, file, metadata={"about": "test"})
    model = read_model_file(str(file))
    assert model.path == str(file)
    assert model.file_bytes == file.stat().st_size
    assert model.mtime_ns == file.stat().st_mtime_ns
    assert {name: (entry.dtype, entry.shape) for name, entry in model.entries.items()} == {
        "a": ("F16", (2, 3)),
        "b": ("F32", (0,)),
        "c": ("F32", ()),
    }
    content = file.read_bytes()
    entry = model.entries["a"]
    assert content[entry.start : entry.stop] == tensors["a"].numpy().tobytes()
    assert entry.path == str(file)


def test_item_sizes_are_those_of_the_format(file: Path) -> None:
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
    ):
        save_file({"x": torch.zeros(3, dtype=dtype)}, file)
        entry = read_model_file(str(file)).entries["x"]
        assert BY_CODE[entry.dtype].bytes == dtype.itemsize


@pytest.mark.parametrize("size", [0, 1, 7])
def test_file_shorter_than_a_length_is_refused(file: Path, size: int) -> None:
    file.write_bytes(b"\0" * size)
    assert (
        refusal(lambda: read_model_file(str(file)))
        == f"model.safetensors has only {size} bytes; download it again"
    )


@pytest.mark.parametrize("length", [3, 100, MAX_HEADER_BYTES + 1, 2 * 2**30, 2**63, 2**64 - 1])
def test_header_longer_than_the_file_is_refused(file: Path, length: int) -> None:
    write_raw(file, {}, length=length)
    message = refusal(lambda: read_model_file(str(file)))
    assert f"its header has {length} bytes, but the file has 10" in message


def test_header_over_the_limit_is_refused_without_being_read(file: Path) -> None:
    write_raw(file, {}, length=2 * 2**30)
    os.truncate(file, 3 * 2**30)  # sparse
    assert "its header has 2147483648 bytes" in refusal(lambda: read_model_file(str(file)))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        ({"x": None}, "entry of 'x' is incomplete"),
        ({"x": []}, "entry of 'x' is incomplete"),
        ({"x": {"dtype": "U8", "shape": [0]}}, "entry of 'x' is incomplete"),
        ({"x": {"dtype": "U8", "shape": [0], "data_offsets": [0]}}, "entry of 'x' is incomplete"),
        (
            {"x": tensor(0, 0, dtype="X9")},
            "'x' has the type 'X9', which is not known; known are F64",
        ),
        ({"x": tensor(0, 0) | {"dtype": ["U8"]}}, "which is not known"),
        ({"x": tensor(0, 1) | {"dtype": {"U8": None}}}, "which is not known"),
        ({"x": tensor(0, 8, dtype="F4")}, "'x' has the type 'F4', which is not known"),
        ({"x": tensor(0, 8, dtype="F32", shape=[3])}, "do not give its bytes 0..8"),
        ({"x": tensor(0, 8, shape=[-2, -4])}, "do not give its bytes"),
        ({"x": tensor(0, 8, shape=[8.0])}, "do not give its bytes"),  # type: ignore[list-item]
        ({"x": tensor(0, 8, shape=[True] * 3 + [8])}, "do not give its bytes"),
        ({"x": tensor(8, 0, shape=[])}, "do not give its bytes"),
        ({"x": tensor(0, 1, shape=[1] * 17)}, "do not give its bytes"),
        ({"x": tensor(0, 8) | {"shape": "8"}}, "do not give its bytes"),
        ({"x": tensor(0, 8, shape=[2**62, 2**62])}, "do not give its bytes"),
        ({"x": tensor(0, 6), "y": tensor(4, 8)}, "'y' overlaps the tensor before it"),
        ({"x": tensor(0, 4), "y": tensor(0, 8)}, "'y' overlaps the tensor before it"),
        ({"x": tensor(0, 3), "y": tensor(4, 8)}, "'y' leaves a gap before it"),
        ({"x": tensor(1, 8)}, "'x' leaves a gap before it"),
        ({"x": tensor(0, 7)}, "its header describes"),
        ({"x": tensor(0, 9)}, "it is truncated or damaged: download it again"),
        ({}, "its header describes"),
    ],
)
def test_damaged_header_is_refused(file: Path, header: object, message: str) -> None:
    write_raw(file, header, b"\0" * 8)
    assert message in refusal(lambda: read_model_file(str(file)))


@pytest.mark.parametrize("piece", [b"[],", b'{"a":0},', b"0,", b'"",', b"[", b'{"a":'])
def test_largest_header_is_refused_within_time_and_memory(file: Path, piece: bytes) -> None:
    body = piece * (MAX_HEADER_BYTES // len(piece))
    write_raw(file, b'{"x": [' + body[: MAX_HEADER_BYTES - 20] + b"0]}")
    script = (
        "import resource, sys\n"
        "from comfy_wan_dist.ipc.errors import ModelFileError\n"
        "from comfy_wan_dist.model_file.header import read_model_file\n"
        "try:\n"
        "    read_model_file(sys.argv[1])\n"
        "except ModelFileError as error:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(str(error)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    peak_kib, length = map(int, done.stdout.split())
    assert peak_kib < 2**21
    assert length < 500


def test_truncated_file_is_refused(file: Path) -> None:
    save_file({"x": torch.zeros(100)}, file)
    os.truncate(file, file.stat().st_size - 1)
    message = refusal(lambda: read_model_file(str(file)))
    size = file.stat().st_size
    assert message.startswith(
        f"model.safetensors has {size} bytes but its header describes {size + 1};"
    )


@pytest.mark.parametrize("name", ["model.pth", "model.pt", "model.ckpt", "model.bin", "model"])
def test_other_kinds_of_file_are_refused_unopened(tmp_path: Path, name: str) -> None:
    # It does not exist: had it been opened, the message would be another.
    message = refusal(lambda: read_model_file(str(tmp_path / name)))
    assert message.startswith(
        f"{name} is not a .safetensors or .gguf file; pickled checkpoints can run code"
    )


def test_missing_file_is_refused(file: Path) -> None:
    assert "No such file" in refusal(lambda: read_model_file(str(file)))


def test_symlink_loop_is_refused(file: Path) -> None:
    file.symlink_to(file.name)
    assert "cannot be read: Too many levels of symbolic links" in refusal(
        lambda: read_model_file(str(file))
    )


def test_symlink_to_a_file_is_followed(file: Path, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3)}, tmp_path / "stored.safetensors")
    file.symlink_to("stored.safetensors")
    assert read_model_file(str(file)).entries["x"].shape == (3,)


headers = st.dictionaries(
    st.sampled_from(["a", "b", "c", "__metadata__"]),
    json_values
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(list(BY_CODE)) | json_values,
            "shape": st.lists(st.integers(0, 9), max_size=3) | json_values,
            "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | json_values,
        }
    ),
    max_size=3,
)


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    read_or_refuse(tmp_path_factory, content)


@given(headers, st.binary(max_size=64), st.integers(-9, 9))
def test_any_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], data: bytes, wrong_by: int
) -> None:
    raw = json.dumps(header).encode()
    length = max(0, len(raw) + (wrong_by if abs(wrong_by) > 5 else 0))
    read_or_refuse(tmp_path_factory, struct.pack("<Q", length) + raw + data)


@given(st.data())
def test_any_damage_to_a_real_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(REAL)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    read_or_refuse(tmp_path_factory, bytes(content[:cut]))


GOOD = {"a": tensor(0, 8), "b": tensor(8, 16, dtype="F32", shape=[2]), "__metadata__": {"a": "b"}}
HEADER = json.dumps(GOOD).encode()
REAL = struct.pack("<Q", len(HEADER)) + HEADER + bytes(16)

# What a JSON parser takes and nobody expects. NaN stands for itself.
odd_values = json_values | st.sampled_from(
    [
        -1,
        2**62,
        10**400,
        "x" * 10**5,
        "\ud800",
        "a\nb",
        [0] * 10**5,
        [2**61, 0],
        {"x" * 10**4: [[[[[]]]]]},
    ]
)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every container in `value` with each of its keys."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [(value, key) for key in keys] + [
        place for key in keys for place in places_in(value[key])
    ]


@given(st.data())
def test_any_change_to_a_real_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    header = json.loads(HEADER)
    for _ in range(data.draw(st.integers(1, 3))):
        if not (places := places_in(header)):
            break
        owner, key = data.draw(st.sampled_from(places))
        match data.draw(st.sampled_from(["change", "remove", "rename", "copy"])):
            case "change":
                owner[key] = data.draw(odd_values)
            case "remove":
                del owner[key]
            case "rename" if isinstance(owner, dict):
                owner[str(data.draw(odd_values))] = owner.pop(key)
            case "copy" if isinstance(owner, dict):
                owner[f"{key}2"] = owner[key]
    raw = json.dumps(header).encode()
    if data.draw(st.booleans()):  # a name that occurs twice
        raw = raw[:-1] + b', "a": ' + json.dumps(tensor(0, 0)).encode() + b"}"
    read_or_refuse(tmp_path_factory, struct.pack("<Q", len(raw)) + raw + bytes(16))


def read_or_refuse(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content)
    try:
        model = read_model_file(str(path))
    except ModelFileError as error:
        message = str(error)
    else:
        assert_tiles(model, content)
        content_of(model)
        return
    assert "\n" not in message
    assert len(message) < 1000


def assert_tiles(model: ModelFile, content: bytes) -> None:
    """What is accepted lies in the file without gaps."""
    position = 8 + struct.unpack("<Q", content[:8])[0]
    for entry in sorted(model.entries.values(), key=lambda entry: (entry.start, entry.stop)):
        assert entry.start == position
        position = entry.stop
    assert position == len(content)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["net." * 2**20 + "alpha.alpha"], "a name of 4194315 characters, 'net.net."),
        ([f"a{index}" for index in range(2**16 + 1)], "65537 tensors, and no model more than"),
    ],
)
def test_header_that_would_keep_us_busy_is_refused(
    tmp_path: Path, names: list[str], words: str
) -> None:
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    raw = json.dumps(dict.fromkeys(names, empty)).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    message = refusal(lambda: read_model_file(str(path)))
    assert words in message
    assert len(message) < 300
