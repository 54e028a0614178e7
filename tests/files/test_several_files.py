"""Which files a model is: shards by their index, and folders as diffusers and others lay them out."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from file_kit import SHAPE, json_values, refusal
from hypothesis import given
from safetensors.torch import save_file

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.model_file.files import COMPONENT_FILE
from comfy_wan_dist.model_file.header import (
    read_model_file,
)
from comfy_wan_dist.model_file.wan import read_wan_file
from devtools.checkpoints import TINY_VAE, transformer_weights, vae_weights, write_shards
from devtools.quantised import write_gguf
from devtools.references import build_diffusers_transformer

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
    assert names_of(folder) == names_of(folder / "transformer") == set(expected_parameters(SHAPE))
    assert (
        names_of(folder, "vae")
        == names_of(folder / "vae", "vae")
        == set(vae_weights(TINY_VAE, seed=0))
    )
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    assert names_of(linked) == set(expected_parameters(SHAPE))


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
