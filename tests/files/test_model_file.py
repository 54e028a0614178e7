"""Model files: what is read from a header, what is recognised, and what is refused in one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.dtypes import BY_CODE
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import KNOWN_MODELS, WanShape
from comfy_wan_dist.model_file.encoding import TensorEntry
from comfy_wan_dist.model_file.files import COMPONENT_FILE
from comfy_wan_dist.model_file.header import (
    MAX_HEADER_BYTES,
    ModelFile,
    content_of,
    read_model_file,
)
from comfy_wan_dist.model_file.names import PREFIXES
from comfy_wan_dist.model_file.wan import SUPPORTED, read_wan_file
from devtools.checkpoints import TINY_VAE, transformer_weights, vae_weights, write_shards
from devtools.quantised import write_gguf
from devtools.references import build_diffusers_transformer

SHAPE = WanShape(dim=128, ffn_dim=64, num_layers=2, in_dim=48, out_dim=48, text_dim=16, freq_dim=8)


def write_raw(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with this header (JSON unless bytes), telling `length` as its length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def tensor(
    start: int, stop: int, *, dtype: str = "U8", shape: list[int] | None = None
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def refusal(action: Callable[[], object]) -> str:
    """The message of the ModelFileError that `action` raises: one line, and never a path of many lines."""
    with pytest.raises(ModelFileError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# ---- header


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


json_values = st.recursive(
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


# ---- several files


def write_model_shards(folder: Path, parts: int = 3) -> list[Path]:
    return write_shards(folder, transformer_weights(SHAPE, seed=1), parts=parts)


def write_index(folder: Path, weight_map: object) -> Path:
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_any_shard_stands_for_all_files(tmp_path: Path) -> None:
    paths = write_model_shards(tmp_path)
    for path in paths:
        model = read_model_file(str(path))
        assert model.path == str(paths[0])  # one model, whichever was chosen
        assert model.file_bytes == sum(p.stat().st_size for p in paths)
        assert model.mtime_ns == sum(p.stat().st_mtime_ns for p in paths)
        assert {entry.path for entry in model.entries.values()} == {str(p) for p in paths}
        assert read_wan_file(model).shape == SHAPE


def test_replaced_shard_is_noticed_though_it_is_old(tmp_path: Path) -> None:
    first, *_ = write_model_shards(tmp_path)
    before = read_model_file(str(first))
    os.utime(first, (1, 1))
    after = read_model_file(str(first))
    assert (before.file_bytes, before.mtime_ns) != (after.file_bytes, after.mtime_ns)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("pattern", ["part{}.safetensors", "x-0000{}-of-00009.safetensors"])
def test_path_of_a_model_leads_to_all_its_files_whatever_they_are_called(
    tmp_path: Path, pattern: str, parts: int
) -> None:
    weights = transformer_weights(SHAPE, seed=1)
    names = {name: pattern.format(index % parts) for index, name in enumerate(weights)}
    for shard in set(names.values()):
        save_file({n: weights[n] for n, s in names.items() if s == shard}, tmp_path / shard)
    write_index(tmp_path, names)
    model = read_model_file(str(tmp_path))
    assert model.entries.keys() == weights.keys()
    assert read_model_file(model.path) == model


def test_names_in_capitals_are_those_of_model_files(tmp_path: Path) -> None:
    weights = transformer_weights(SHAPE, seed=1)
    save_file(weights, tmp_path / "A.SAFETENSORS")
    write_gguf(tmp_path / "A.GGUF", weights, ("F16",))
    for name in ("A.SAFETENSORS", "A.GGUF"):
        assert read_model_file(str(tmp_path / name)).entries.keys() == weights.keys()
    (tmp_path / "A.PT").touch()
    assert "never loaded" in refusal(lambda: read_model_file(str(tmp_path / "A.PT")))
    (tmp_path / "A.GGUF").unlink()
    assert read_model_file(str(tmp_path)).path == str(tmp_path / "A.SAFETENSORS")


def test_index_is_read_in_any_unicode_and_whatever_the_locale(tmp_path: Path) -> None:
    weights = transformer_weights(SHAPE, seed=1)
    save_file(weights, tmp_path / "wän 模型.safetensors")
    index = json.dumps(
        {"weight_map": dict.fromkeys(weights, "wän 模型.safetensors")}, ensure_ascii=False
    )
    path = tmp_path / "x.safetensors.index.json"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_text(index, encoding=encoding)
        assert read_model_file(str(path)).entries.keys() == weights.keys()


def test_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    first, second, _ = write_model_shards(tmp_path)
    second.unlink()
    message = refusal(lambda: read_model_file(str(first)))
    assert (
        f"names the shard '{second.name}', which is not there; put all shards in one folder"
        in message
    )
    second.symlink_to(second.name)
    message = refusal(lambda: read_model_file(str(first)))
    assert f"'{second.name}', which is a link that leads nowhere; put" in message


@pytest.mark.parametrize(
    "name",
    [
        "../x-00001-of-00003.safetensors",
        "/tmp/x-00001-of-00003.safetensors",
        "a/x-00001-of-00003.safetensors",
        "./x-00001-of-00003.safetensors",
        "../x.safetensors",
        "x.pth",
        "",
        ".",
        "..",
        3,
        None,
    ],
)
def test_index_that_names_no_model_file_of_its_folder_is_refused(
    tmp_path: Path, name: object
) -> None:
    first, *_ = write_model_shards(tmp_path)
    for folder in (tmp_path, tmp_path.parent, tmp_path / "a"):
        folder.mkdir(exist_ok=True)
        save_file({"x": torch.zeros(1)}, folder / "x-00001-of-00003.safetensors")
    write_index(tmp_path, {"head.modulation": name, "head.head.weight": first.name})
    message = refusal(lambda: read_model_file(str(first)))
    assert "diffusion_pytorch_model.safetensors.index.json" in message


def test_shard_with_an_impossible_name_is_refused(tmp_path: Path) -> None:
    first, *_ = write_model_shards(tmp_path)
    for stem in ("x" * 235, "x\0"):
        write_index(tmp_path, {"head.modulation": f"{stem}-00001-of-00003.safetensors"})
        assert "which is not there" in refusal(lambda: read_model_file(str(first)))


@given(json_values)
def test_any_index_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, weight_map: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz-00001-of-00001.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    index = path.with_name("fuzz.safetensors.index.json")
    for content in (
        weight_map,
        {"weight_map": weight_map},
        {"weight_map": {"x": path.name, "y": weight_map}},
    ):
        index.write_text(json.dumps(content))
        with contextlib.suppress(ModelFileError):
            assert set(read_model_file(str(path)).entries) <= {"x"}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}', "\ufffd"]
)
def test_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    first, *_ = write_model_shards(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(content)
    message = refusal(lambda: read_model_file(str(first)))
    assert "is one shard of several, but its index" in message


def test_shard_without_index_is_refused(tmp_path: Path) -> None:
    first, *_ = write_model_shards(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").unlink()
    assert "put all shards and the index in one folder" in refusal(
        lambda: read_model_file(str(first))
    )


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    first, second, _ = write_model_shards(tmp_path)
    save_file(
        {"head.modulation": torch.zeros(1, 2, SHAPE.dim), "patch_embedding.bias": torch.zeros(128)},
        second,
    )
    message = refusal(lambda: read_model_file(str(first)))
    assert f"{second.name} repeats the tensor 'head.modulation' of another shard" in message


def test_shard_that_its_index_does_not_name_is_refused(tmp_path: Path) -> None:
    first, second, third = write_model_shards(tmp_path)
    write_index(tmp_path, {"head.modulation": first.name, "head.head.weight": second.name})
    message = refusal(lambda: read_model_file(str(third)))
    assert message.startswith(f"{third.name} is none of the shards")


def test_index_of_pickles_is_refused(tmp_path: Path) -> None:
    first, *_ = write_model_shards(tmp_path)
    (tmp_path / "x-00001-of-00001.bin").write_bytes(b"\x80\x04\x95")
    write_index(tmp_path, {"head.modulation": "x-00001-of-00001.bin"})
    message = refusal(lambda: read_model_file(str(first)))
    assert "names 'x-00001-of-00001.bin'; pickled checkpoints can run code" in message


def test_index_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    first, *_ = write_model_shards(tmp_path)
    os.truncate(write_index(tmp_path, {}), 2**40)  # sparse
    assert "it has more than 16777216 bytes" in refusal(lambda: read_model_file(str(first)))


# ---- folders


def write_pipeline(folder: Path) -> Path:
    """A pipeline as diffusers lays it out: a transformer in shards, a VAE and a text encoder."""
    for name in ("transformer", "vae", "text_encoder"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    (folder / "model_index.json").write_text("{}")
    write_model_shards(folder / "transformer", parts=2)
    save_file(vae_weights(TINY_VAE, seed=0), folder / "vae" / COMPONENT_FILE)
    save_file({"x": torch.zeros(1)}, folder / "text_encoder" / "model.safetensors")
    return folder


def names_of(path: Path, component: str = "transformer") -> set[str]:
    return set(read_model_file(str(path), component=component).entries)


def test_folder_of_shards_is_the_model(tmp_path: Path) -> None:
    paths = write_model_shards(tmp_path)
    (tmp_path / "Wan2.2_VAE.pth").write_bytes(b"\x80\x04\x95")
    (tmp_path / "other.safetensors").write_bytes(b"")
    by_folder, by_shard = read_model_file(str(tmp_path)), read_model_file(str(paths[0]))
    assert by_folder == by_shard
    assert by_folder.path == str(paths[0])
    assert read_model_file(f"{tmp_path}/") == by_shard


def test_folder_of_diffusers_is_the_component_asked_for(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "pipeline")
    assert names_of(folder) == names_of(folder / "transformer") == set(wan_shapes())
    assert names_of(folder, "vae") == names_of(folder / "vae", "vae") == set(vae_names())
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    assert names_of(linked) == set(wan_shapes())


def test_folder_of_one_file_is_that_file(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "any.safetensors")
    assert read_model_file(str(tmp_path)).path == str(tmp_path / "any.safetensors")
    save_file({"y": torch.zeros(1)}, tmp_path / COMPONENT_FILE)
    assert names_of(tmp_path) == {"y"}  # what diffusers would take


@pytest.mark.parametrize("max_shard_size", ["10GB", "200KB"])
def test_variant_of_diffusers_is_the_model_where_there_is_no_other(
    max_shard_size: str, tmp_path: Path
) -> None:
    transformer = build_diffusers_transformer(SHAPE, transformer_weights(SHAPE, seed=1))
    transformer.half().save_pretrained(tmp_path, variant="fp16", max_shard_size=max_shard_size)
    found = sorted(tmp_path.glob("*.fp16*.safetensors"))
    assert (len(found) > 1) == (max_shard_size == "200KB")
    folder = read_model_file(str(tmp_path))
    assert read_wan_file(folder).shape == SHAPE
    assert read_model_file(str(found[-1])) == folder
    assert read_model_file(folder.path) == folder
    plain = tmp_path / "plain"
    transformer.float().save_pretrained(plain, max_shard_size=max_shard_size)
    for path in plain.iterdir():
        path.rename(tmp_path / path.name)
    plain.rmdir()
    assert {each.dtype for each in read_model_file(str(tmp_path)).entries.values()} == {"F32"}
    assert read_model_file(str(found[-1])) == folder


def test_index_of_a_variant_stands_for_its_folder_unless_there_is_another(tmp_path: Path) -> None:
    for variant in ("fp16", "bf16"):
        shard = f"m.{variant}-00001-of-00001.safetensors"
        index = tmp_path / f"m.safetensors.index.{variant}.json"
        save_file({variant: torch.zeros(1)}, tmp_path / shard)
        index.write_text(json.dumps({"weight_map": {variant: shard}}))
        if variant == "fp16":
            save_file({"x": torch.zeros(1)}, tmp_path / "another.safetensors")
            assert names_of(tmp_path) == {"fp16"}
    assert refusal(lambda: read_model_file(str(tmp_path))).endswith(
        "holds 'm.safetensors.index.bf16.json', 'm.safetensors.index.fp16.json'; choose one of them"
    )


def test_folder_without_one_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def message() -> str:
        return refusal(lambda: read_model_file(str(folder)))

    assert message() == "folder holds no .safetensors file; choose another folder"
    for name in ("a.bin", "b.pth", "c.pt", "d.ckpt"):
        (folder / name).write_bytes(b"\x80\x04\x95")
    assert message().startswith("folder holds only 'a.bin', 'b.pth', 'c.pt' and 1 more; pickled")
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"x": torch.zeros(1)}, folder / name)
    assert message() == "folder holds 'x.safetensors', 'y.safetensors'; choose one of them"


def test_folder_of_shards_that_is_incomplete_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    _, second, _ = write_model_shards(folder)
    second.unlink()
    message = refusal(lambda: read_model_file(str(folder)))
    assert f"names the shard '{second.name}', which is not there" in message
    index = write_index(folder, {})
    assert f"{index.name} names shards that are no" in refusal(lambda: read_model_file(str(folder)))
    index.write_text("{")
    message = refusal(lambda: read_model_file(str(folder)))
    assert message.startswith(f"the index {index.name} cannot be read")
    index.unlink()
    message = refusal(lambda: read_model_file(str(folder)))
    assert "is one shard of several, but its index" in message


def test_folder_of_diffusers_without_the_component_is_refused(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "pipeline")
    (folder / "vae").rename(folder / "autoencoder")
    message = refusal(lambda: read_model_file(str(folder), component="vae"))
    assert message == "pipeline is a folder of diffusers without vae/; download it again"


@pytest.mark.parametrize("place", ["", "transformer", "transformer/" + COMPONENT_FILE])
def test_folder_with_links_in_a_circle_is_refused(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "folder"
    if place:
        (folder / "transformer").mkdir(parents=True)
        (folder / "model_index.json").write_text("{}")
    link = folder / place
    if link.is_dir():
        link.rmdir()
    link.symlink_to(link.name)
    message = refusal(lambda: read_model_file(str(folder)))
    assert message.startswith(f"{link.name} cannot be read: Too many levels of symbolic links")


# ---- recognition


def model_file(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F16") -> ModelFile:
    """A file of these tensors, without the file."""
    entries = {
        name: TensorEntry(dtype=dtype, shape=shape, path="some.safetensors", start=0, stop=0)
        for name, shape in shapes.items()
    }
    return ModelFile(path="folder/some.safetensors", entries=entries, file_bytes=0, mtime_ns=0)


def wan_shapes(shape: WanShape = SHAPE) -> dict[str, tuple[int, ...]]:
    return expected_parameters(shape)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_wan_file_is_recognised_behind_a_prefix(prefix: str) -> None:
    shapes = {prefix + name: shape for name, shape in wan_shapes().items()}
    file = read_wan_file(model_file(shapes))
    assert file.shape == SHAPE
    assert set(file.entries) == set(wan_shapes())


def test_tensors_beside_the_prefix_are_left_alone() -> None:
    shapes = {"model.diffusion_model." + name: shape for name, shape in wan_shapes().items()}
    file = read_wan_file(model_file(shapes | {"first_stage_model.decoder.conv1.weight": (1,)}))
    assert set(file.entries) == set(wan_shapes())


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        ("ti2v-5b", 825, 4_999_787_712),
        ("t2v-14b", 1095, 14_288_491_584),
        ("i2v-14b", 1095, 14_288_901_184),
        ("t2v-1.3b", 825, 1_418_996_800),
    ],
)
def test_models_of_the_family_are_recognised(model: str, tensors: int, parameters: int) -> None:
    shapes = wan_shapes(KNOWN_MODELS[model])
    assert len(shapes) == tensors
    assert sum(torch.Size(s).numel() for s in shapes.values()) == parameters
    assert read_wan_file(model_file(shapes)).shape == KNOWN_MODELS[model]


def test_missing_tensors_are_named() -> None:
    shapes = wan_shapes()
    del shapes["blocks.1.ffn.2.bias"], shapes["text_embedding.2.weight"]
    message = refusal(lambda: read_wan_file(model_file(shapes)))
    assert message.startswith("some.safetensors lacks 2 tensors, the first is blocks.1.ffn.2.bias;")


@pytest.mark.parametrize(
    "name",
    [
        "patch_embedding.weight",
        "head.head.weight",
        "blocks.0.ffn.0.weight",
        "text_embedding.0.weight",
    ],
)
def test_missing_tensor_that_tells_the_shape_is_named(name: str) -> None:
    shapes = wan_shapes()
    del shapes[name]
    assert f"lacks the tensor {name}" in refusal(lambda: read_wan_file(model_file(shapes)))


@pytest.mark.parametrize(
    "name", ["blocks.0.extra", "extra", "blocks.0.ffn.0.zero_point", "blocks.70000.x"]
)
def test_extra_tensor_is_refused_by_name(name: str) -> None:
    message = refusal(lambda: read_wan_file(model_file(wan_shapes() | {name: (1,)})))
    assert (
        f"has 1 tensors that a supported Wan model does not have, '{name}'; it is another kind"
        in message
    )


def test_extra_tensors_are_listed() -> None:
    extra = {f"blocks.0.extra{i}": (1,) for i in range(5)}
    message = refusal(lambda: read_wan_file(model_file(wan_shapes() | extra)))
    listed = "'blocks.0.extra0', 'blocks.0.extra1', 'blocks.0.extra2' and 2 more"
    assert f"has 5 tensors that a supported Wan model does not have, {listed}; it is" in message
    long = {"blocks.0." + "x\n" * 1000: (1,)}
    assert "1 tensors" in refusal(lambda: read_wan_file(model_file(wan_shapes() | long)))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blocks.0.self_attn.q.weight", (128, 64), "its other tensors ask for [128, 128]"),
        ("blocks.1.ffn.0.bias", (65,), "its other tensors ask for [64]"),
        ("head.modulation", (2, 128), "head.modulation has shape [2, 128]; it must have 3 dims"),
        ("head.modulation", (1, 2, 130), "width 130, which is no multiple of 128"),
        ("head.modulation", (1, 2, 0), "width 0"),
        ("blocks.0.ffn.0.weight", (0, 128), "widths that no Wan model has: ffn_dim 0, text_dim 16"),
        ("text_embedding.0.weight", (128, 0), "text_dim 0, freq_dim 8; download it again"),
        ("time_embedding.0.weight", (128, 7), "freq_dim 7;"),
        ("patch_embedding.weight", (128, 192), "must have 5 dims"),
        ("text_embedding.0.weight", (), "must have 2 dims"),
    ],
)
def test_tensor_of_another_shape_is_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    assert message in refusal(lambda: read_wan_file(model_file(wan_shapes() | {name: shape})))


@pytest.mark.parametrize("dtype", ["C64", "F8_E8M0", "U8", "I64"])
def test_weights_of_another_type_are_refused(dtype: str) -> None:
    message = refusal(lambda: read_wan_file(model_file(wan_shapes(), dtype)))
    assert (
        f"as {dtype}, which is not supported; choose an fp8 (e4m3fn or e5m2), GGUF, 16- or 32-bit file"
        in message
    )


@pytest.mark.parametrize(
    ("dim", "in_dim", "out_dim", "name"),
    [
        (5120, 48, 16, "a Wan2.1 Fun-Control model with 48 input and 16 output channels"),
        (5120, 52, 16, "a Wan2.2 Fun-Control model"),
        (3072, 100, 48, "a Wan2.2 Fun-InP 5B model with 100 input and 48 output channels"),
        (3072, 96, 48, "a Lucy-Edit model"),
        (5120, 16, 48, "a Wan variant of width 5120 with 16 input and 48 output channels"),
    ],
)
def test_wan_models_of_another_kind_are_refused_by_name(
    dim: int, in_dim: int, out_dim: int, name: str
) -> None:
    shape = WanShape(dim=dim, ffn_dim=64, num_layers=1, in_dim=in_dim, out_dim=out_dim)
    message = refusal(lambda: read_wan_file(model_file(wan_shapes(shape))))
    assert f"some.safetensors is {name}" in message
    assert f"choose a {SUPPORTED} file" in message


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("vace_patch_embedding.weight", "a Wan VACE model"),
        ("img_emb.proj.0.bias", "a Wan2.1 image-to-video model"),
        ("face_adapter.fuser_blocks.0.k_norm.weight", "a Wan Animate model"),
        ("patch_embedding_mask.weight", "a SCAIL 2 model"),
        ("patch_embedding_pose.weight", "a SCAIL model"),
        ("patch_embedding_global.weight", "a WanDancer model"),
        ("audio_proj.proj1.weight", "a MultiTalk or InfiniteTalk model"),
    ],
)
def test_siblings_are_refused_by_name(tensor: str, kind: str) -> None:
    message = refusal(lambda: read_wan_file(model_file(wan_shapes() | {tensor: (1,)})))
    assert (
        message == f"some.safetensors is {kind}, which is not supported; choose a {SUPPORTED} file"
    )


def test_infinitetalk_alone_is_refused_by_name() -> None:
    patch = {"blocks.0.audio_cross_attn.q_linear.weight": (4, 4), "audio_proj.proj1.weight": (4, 4)}
    message = refusal(lambda: read_wan_file(model_file(patch)))
    assert message.startswith("some.safetensors is a MultiTalk or InfiniteTalk model, which is not")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"model_type": "flow_rvs"}, "a Wan model of the type 'flow_rvs'"),
        ({"model_type": "t2v", "causal_ar": True}, "a causal Wan model"),
        ({"model_type": "next\nyear"}, r"a Wan model of the type 'next\nyear'"),
    ],
)
def test_siblings_that_only_metadata_tells_are_refused_by_name(
    settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "some.safetensors"
    save_file(
        transformer_weights(SHAPE, seed=1),
        path,
        metadata={"config": json.dumps({"transformer": settings})},
    )
    message = refusal(lambda: read_wan_file(read_model_file(str(path))))
    assert (
        message == f"some.safetensors is {kind}, which is not supported; choose a {SUPPORTED} file"
    )


@pytest.mark.parametrize(
    "config",
    [
        *(json.dumps({"transformer": {"model_type": kind}}) for kind in ("t2v", "i2v", "ti2v")),
        '{"transformer": {"causal_ar": false, "dim": 5120}}',
        '{"transformer": []}',
        '{"vae": {}}',
        "[1]",
        "lr: 1e-4",
        "[" * 100_000,
    ],
)
def test_other_metadata_does_not_matter(config: str, tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file(transformer_weights(SHAPE, seed=1), path, metadata={"config": config})
    assert read_wan_file(read_model_file(str(path))).shape == SHAPE


def test_metadata_does_not_make_a_file_wan() -> None:
    config = json.dumps({"transformer": {"model_type": "flow_rvs"}})
    file = replace(model_file({"something": (4, 4)}), metadata={"config": config})
    assert "is not a Wan transformer" in refusal(lambda: read_wan_file(file))


def vae_names() -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in vae_weights(TINY_VAE, seed=0).items()}


@pytest.mark.parametrize(
    ("shapes", "guess"),
    [
        (vae_names(), "it looks like a VAE"),
        (
            {"encoder.block.0.layer.0.SelfAttention.q.weight": (4, 4)},
            "it looks like a text encoder",
        ),
        ({"diffusion_model.blocks.0.ffn.0.lora_A.weight": (4, 4)}, "it looks like a LoRA"),
        ({"something": (4, 4)}, "its 1 tensors have other names"),
        ({}, "its 0 tensors have other names"),
    ],
)
def test_other_models_are_refused_by_what_they_look_like(
    shapes: dict[str, tuple[int, ...]], guess: str
) -> None:
    message = refusal(lambda: read_wan_file(model_file(shapes)))
    assert (
        message == f"some.safetensors is not a Wan transformer: {guess}; choose a {SUPPORTED} file"
    )


def test_file_name_does_not_matter(tmp_path: Path) -> None:
    weights: dict[str, Tensor] = transformer_weights(SHAPE, seed=1)
    path = tmp_path / "wan2.1_vae_14B_fp8.safetensors"
    save_file(weights, path)
    assert read_wan_file(read_model_file(str(path))).shape == SHAPE
