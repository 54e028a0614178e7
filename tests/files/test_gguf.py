"""GGUF headers: what is read, and what is refused in one sentence with little memory, however hostile the file."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.gguf import TYPES, GgufHeader, read_gguf_header
from comfy_wan_dist.model_file.header import ModelFile, read_model_file
from comfy_wan_dist.model_file.wan import read_wan_file
from devtools.checkpoints import transformer_weights
from devtools.quantised import write_gguf

SHAPE = WanShape(dim=128, ffn_dim=64, num_layers=1, in_dim=48, out_dim=48, text_dim=32, freq_dim=32)
MEMORY = 4 * 2**20


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


ARCHITECTURE = key("general.architecture", 8, text("wan"))


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def write(
    path: Path,
    *tensors: bytes,
    keys: tuple[bytes, ...] = (ARCHITECTURE,),
    data: int = 64,
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
) -> Path:
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors))
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(data))
    return path


def refusal(action: Callable[[], object]) -> str:
    """The message of the ModelFileError that `action` raises, for which it needs little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            action()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def read(path: Path) -> ModelFile:
    return read_model_file(str(path))


# ---- what is read


@pytest.mark.parametrize("is_reshaped", [True, False])
def test_entries_are_those_that_the_package_reads(file: Path, is_reshaped: bool) -> None:
    kinds = ("Q8_0", "BF16", "Q4_0", "F16")
    write_gguf(file, transformer_weights(SHAPE, seed=3), kinds, is_reshaped=is_reshaped)
    model = read(file)
    assert model.file_bytes == file.stat().st_size
    expected = gguf.GGUFReader(file).tensors
    assert list(model.entries) == [tensor.name for tensor in expected]
    for tensor_ in expected:
        entry = model.entries[tensor_.name]
        assert entry.dtype == tensor_.tensor_type.name
        assert entry.start == tensor_.data_offset
        assert entry.size == tensor_.n_bytes
        if len(entry.shape) != 5:
            assert entry.shape == tuple(reversed(tensor_.shape.tolist()))
    assert model.entries["patch_embedding.weight"].shape == (128, 48, 1, 2, 2)
    shapes = {name: tensor.shape for name, tensor in read_wan_file(model).entries.items()}
    assert shapes == expected_parameters(SHAPE)


def test_types_have_the_numbers_of_the_package() -> None:
    theirs = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: theirs[number] for number in TYPES} == TYPES


@pytest.mark.parametrize(
    "architecture",
    [
        (),
        (ARCHITECTURE,),
        (key("general.architecture", 8, text("pig")),),
        (key("general.architecture", 4, struct.pack("<I", 7)),),
    ],
)
def test_names_decide_and_not_the_architecture(file: Path, architecture: tuple[bytes, ...]) -> None:
    assert read(write(file, keys=architecture)).entries == {}
    other = write(file, tensor("token_embd.weight", (4,), 0, 0), keys=architecture)
    message = refusal(lambda: read_wan_file(read(other)))
    assert message.startswith("m.gguf is not a Wan transformer: its 1 tensors have other names")


@pytest.mark.parametrize("architecture", ["pig", "wan"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_wan_is_recognised_whatever_it_is_called(
    file: Path, architecture: str, prefix: str
) -> None:
    weights = transformer_weights(SHAPE, seed=3)
    named = {f"{prefix}{name}": value for name, value in weights.items()}
    write_gguf(file, named, ("Q8_0",), architecture=architecture)
    assert {name: tensor.shape for name, tensor in read_wan_file(read(file)).entries.items()} == (
        expected_parameters(SHAPE)
    )


# ---- in several files


@pytest.fixture
def parts(file: Path) -> list[Path]:
    """Of a model whose patches come in another part than what is said of their shape."""
    weights = transformer_weights(SHAPE, seed=3)
    order = sorted(weights, key=lambda name: name == "patch_embedding.weight")
    write_gguf(file, {name: weights[name] for name in order}, ("Q8_0",), tensors_a_part=9)
    found = sorted(file.parent.glob("*.gguf"))
    assert len(found) > 2
    return found


def test_any_part_stands_for_all(parts: list[Path]) -> None:
    for part in (parts[0], parts[-1]):
        model = read(part)
        assert model.path == str(parts[0])
        assert model.file_bytes == sum(each.stat().st_size for each in parts)
        shapes = {name: tensor.shape for name, tensor in read_wan_file(model).entries.items()}
        assert shapes == expected_parameters(SHAPE)


def test_header_of_a_part_is_told_the_keys_before_it_and_gives_its_own(parts: list[Path]) -> None:
    shape = "comfy.gguf.orig_shape.patch_embedding.weight"

    def header(part: Path, before: Mapping[str, Any]) -> GgufHeader:
        with part.open("rb") as opened:
            size = part.stat().st_size
            return read_gguf_header(
                opened, part, size, parts=len(parts), before=MappingProxyType(before)
            )

    first, last = header(parts[0], {}), header(parts[-1], {})
    assert first.keys == {"split.count": len(parts), shape: (128, 48, 1, 2, 2)}
    assert last.keys == {"split.count": len(parts)}
    assert last.entries["patch_embedding.weight"].shape == (128, 192)
    reshaped = header(parts[-1], first.keys).entries["patch_embedding.weight"]
    assert reshaped.shape == (128, 48, 1, 2, 2)


def test_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    message = refusal(lambda: read(parts[0]))
    assert message == (
        f"{parts[0].name} is one part of {len(parts)}, but {parts[1].name} is not there; put all parts in one folder"
    )


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00002.gguf", "m-00004-of-00000.gguf"])
def test_part_under_another_name_is_refused(parts: list[Path], name: str) -> None:
    other = parts[1].rename(parts[1].with_name(name))
    other.with_name("m-00002-of-00002.gguf").write_bytes(parts[2].read_bytes())
    assert refusal(lambda: read(other)) == (
        f"{name} is one part of {len(parts)} that has lost its name; name all as llama-gguf-split does, or merge them"
    )


# ---- what is refused


def test_truncated_file_is_refused_wherever_it_ends(file: Path) -> None:
    write_gguf(file, {"a": torch.ones(4, 32)}, ("Q8_0",))
    whole = file.read_bytes()
    for size in range(read(file).entries["a"].stop):
        file.write_bytes(whole[:size])
        message = refusal(lambda: read(file))
        assert message.startswith(f"m.gguf has {'only ' if 'only' in message else ''}{size} bytes")
        assert message.endswith("download it again")


def test_data_that_ends_early_is_named(file: Path) -> None:
    write(file, tensor("x", (32, 4), 8, 0), data=135)
    size = file.stat().st_size
    assert refusal(lambda: read(file)) == (
        f"m.gguf has {size} bytes but 'x' ends at {size + 1}; it is truncated: download it again"
    )


@pytest.mark.parametrize(("kind", "named"), [(23, "IQ4_XS"), (4, "4"), (2**32 - 1, "4294967295")])
def test_other_type_is_refused_by_name(file: Path, kind: int, named: str) -> None:
    message = refusal(lambda: read(write(file, tensor("x", (256, 1), kind, 0))))
    assert (
        f"stores 'x' in the GGUF type {named}, which is not supported; choose a file of F32"
        in message
    )


HUGE = 2**62


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"tensor_count": HUGE}, f"says that it has {HUGE} tensors and 1 keys"),
        ({"key_count": HUGE}, f"says that it has 0 tensors and {HUGE} keys"),
        ({"tensor_count": 2**16}, "its header is longer"),
        ({"key_count": 2**16}, "its header is longer"),
        ({"version": 1}, "is GGUF version 1; versions 2 and 3"),
        ({"version": 3 << 24}, "is GGUF version 50331648"),
        ({"tensors": (struct.pack("<Q", HUGE),)}, f"has a name of {HUGE} bytes"),
        ({"tensors": (text("x") + struct.pack("<I", 2**31),)}, "'x' of 2147483648 dims"),
        ({"tensors": (tensor("x", (HUGE, HUGE), 0, 0),)}, "it is truncated"),
        ({"tensors": (tensor("x", (4,), 0, HUGE),)}, "it is truncated"),
        ({"tensors": (tensor("x", (250, 4), 12, 0),)}, "rows of 250 values"),
        (
            {"tensors": (tensor("x", (4,), 0, 0), tensor("x", (4,), 0, 32))},
            "has the tensor 'x' twice",
        ),
        (
            {"tensors": (tensor("x", (4,), 0, 0), tensor("y", (4,), 0, 12))},
            "has 'y' where another tensor is",
        ),
    ],
)
def test_absurd_header_is_refused(file: Path, content: dict[str, object], words: str) -> None:
    tensors = content.pop("tensors", ()) if "tensors" in content else ()
    write(file, *tensors, **content)  # type: ignore[misc, arg-type]
    assert words in refusal(lambda: read(file))


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (key("k", 99, b""), "unknown kind 99"),
        (key("k", 8, struct.pack("<Q", HUGE)), "its header is longer"),
        (key("k", 9, array(0, HUGE)), "its header is longer"),
        (key("k", 9, array(8, HUGE)), "more than 1048576 texts"),
        (key("k", 9, array(8, 2**20 - 10)), "its header is longer"),
        (key("k", 9, array(9, 1, array(0, 0))), "array of the unknown kind 9"),
        (key("general.alignment", 4, struct.pack("<I", 0)), "has the alignment 0"),
        (key("general.alignment", 4, struct.pack("<I", 24)), "has the alignment 24"),
        (key("general.alignment", 6, struct.pack("<f", 32.0)), "has the alignment 32.0"),
        (key("split.count", 2, struct.pack("<H", 3)), "is one part of 3 that has lost its name"),
        (key("split.count", 8, text("x")), "is one part of 'x' that has lost its name"),
        (
            key("comfy.gguf.orig_shape.x", 9, array(5, 2, struct.pack("<2i", 2, 3))),
            "has 'x' of shape [4], which does not become (2, 3)",
        ),
        (
            key("comfy.gguf.orig_shape.x", 9, array(5, 2, struct.pack("<2i", -2, -2))),
            "does not become (-2, -2)",
        ),
        (
            key("comfy.gguf.orig_shape.x", 9, array(6, 2, struct.pack("<2f", 2, 2))),
            "does not become (2.0, 2.0)",
        ),
        (key("comfy.gguf.orig_shape.x", 8, text("four")), "does not become 'four'"),
        (key("comfy.gguf.orig_shape.x", 4, struct.pack("<I", 4)), "does not become 4"),
    ],
)
def test_absurd_value_is_refused(file: Path, value: bytes, words: str) -> None:
    write(file, tensor("x", (4,), 0, 0), keys=(ARCHITECTURE, value), data=2**16)
    assert words in refusal(lambda: read(file))


def test_file_of_something_else_is_refused(file: Path) -> None:
    file.write_bytes(b"<!DOCTYPE html>")
    assert "does not begin like a GGUF file" in refusal(lambda: read(file))
    file.unlink()
    assert refusal(lambda: read(file)) == "m.gguf cannot be read: No such file or directory"


def test_missing_tensor_is_named(file: Path) -> None:
    weights = transformer_weights(SHAPE, seed=3)
    del weights["blocks.0.ffn.2.bias"]
    write_gguf(file, weights, ("Q8_0",))
    message = refusal(lambda: read_wan_file(read(file)))
    assert "lacks 1 tensors, the first is blocks.0.ffn.2.bias" in message


# ---- anything at all


def read_or_refuse(folder: Path, content: bytes) -> None:
    path = folder / "fuzz.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        entries = read(path).entries.values()
    except ModelFileError:
        return
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY
    # What is accepted lies inside the file, apart from each other.
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        assert position <= entry.start <= entry.stop <= len(content)
        position = entry.stop


SMALL = (
    b"GGUF"
    + struct.pack("<IQQ", 3, 2, 3)
    + ARCHITECTURE
    + key("words", 9, array(8, 2, text("a") + text("b")))
    + key("comfy.gguf.orig_shape.x", 9, array(5, 2, struct.pack("<2i", 2, 2)))
    + tensor("x", (4,), 0, 0)
    + tensor("y", (32, 2), 8, 32)
)
REAL = SMALL + bytes(-len(SMALL) % 32) + bytes(100)


@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=6
    )
)
def test_changed_bytes_are_read_or_refused(
    changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(REAL)
    for place, value in changes:
        content[place] = value
    read_or_refuse(tmp_path_factory.getbasetemp(), bytes(content))


@given(place=st.integers(4, len(SMALL) - 8), value=st.integers(0, 2**64 - 1))
def test_any_number_anywhere_is_read_or_refused(
    place: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = REAL[:place] + struct.pack("<Q", value) + REAL[place + 8 :]
    read_or_refuse(tmp_path_factory.getbasetemp(), content)


@given(rest=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(
    rest: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    read_or_refuse(tmp_path_factory.getbasetemp(), b"GGUF" + struct.pack("<I", 3) + rest)
