"""The nodes' lists of files where folders hold much, or change while they are read.

Run as a script beside ComfyUI. What is counted is how many folders are read, since time says little.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from comfyui_child import found_beside_comfyui

FOLDERS = 40
KINDS = ("diffusion_models", "vae", "diffusers", "loras")


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def write_folders(base: Path) -> None:
    for index in range(FOLDERS):
        touch(base / f"models/diffusers/{index}/unet/x.safetensors")
        touch(base / f"output/{index}/picture.png")
        touch(base / f"input/{index}/prompt.safetensors")
    for kind in KINDS:
        touch(base / f"models/{kind}/first.safetensors")
        (base / f"other/{kind}").mkdir(parents=True)
    touch(base / "models/diffusion_models/deep/q.gguf")
    touch(base / "models/diffusers/Wan/model_index.json")
    touch(base / "models/diffusers/Wan/vae/x.safetensors")
    (base / "input/elsewhere").symlink_to(base / "models")
    (base / "models/diffusers/circle").symlink_to(base / "models")
    (base / "models/diffusers/self").symlink_to("self")


@contextmanager
def folders_read(vanishing: str = "/none/") -> Iterator[list[str]]:
    """What is read meanwhile; a path with `vanishing` in it is gone when it comes to that."""
    read: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def count(path: Any = ".") -> Any:
            read.append(os.fspath(path))
            if vanishing in read[-1]:
                raise FileNotFoundError(path)
            return function(path)

        return count

    with (
        mock.patch.object(os, "scandir", counted(os.scandir)),
        mock.patch.object(os, "listdir", counted(os.listdir)),
    ):
        yield read


def list_again_and_again(base: Path) -> dict[str, Any]:
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import folder_paths

    from comfy_wan_dist.comfyui import folders

    for kind in KINDS:
        places = [str(base / "models" / kind), str(base / "other" / kind)]
        folder_paths.folder_names_and_paths[kind] = (places, {".safetensors"})
    folder_paths.set_input_directory(str(base / "input"))
    folder_paths.set_output_directory(str(base / "output"))

    def lists() -> dict[str, list[str]]:
        return {
            "models": folders.list_models("diffusion_models"),
            "vaes": folders.list_models("vae"),
            "loras": folders.list_loras(),
            "prompts": folders.list_conditioning(),
        }

    found: dict[str, Any] = {}
    with folders_read("/7"):
        found["one vanishes"] = len(lists()["prompts"])
    found["first"] = lists()
    with folders_read() as read:
        found["second"] = lists()
    found["read for the second"] = read
    touch(base / "output/3/new.safetensors")
    touch(base / "models/diffusers/5/model_index.json")
    (base / "models/diffusers/5/transformer").mkdir()
    with folders_read() as read:
        found["changed"] = lists()
    found["read for the changed"] = sorted(read)
    shutil.rmtree(base / "models" / "vae")
    shutil.rmtree(base / "models" / "loras")
    shutil.rmtree(base / "output")
    found["gone"] = lists()
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("long")
    write_folders(base)
    return base


@pytest.fixture(scope="module")
def found(comfyui_path: Path, base: Path) -> dict[str, Any]:
    lists: dict[str, Any] = found_beside_comfyui(__file__, base, comfyui_path)
    return lists


def test_links_are_followed_among_models_only(found: dict[str, Any]) -> None:
    assert found["first"]["models"] == ["first.safetensors", "deep/q.gguf"]
    assert found["first"]["vaes"] == ["Wan [diffusers]", "first.safetensors"]
    assert len(found["first"]["prompts"]) == FOLDERS
    assert "12/prompt.safetensors [input]" in found["first"]["prompts"]


def test_folder_is_read_again_only_once_it_has_changed(found: dict[str, Any], base: Path) -> None:
    assert found["second"] == found["first"]
    assert found["read for the second"] == []
    assert "3/new.safetensors [output]" in found["changed"]["prompts"]
    assert "5 [diffusers]" in found["changed"]["models"]
    changed = ["models/diffusers/5", "output/3"]
    assert found["read for the changed"] == [str(base / folder) for folder in changed]


def test_folder_that_vanishes_takes_only_its_files_out_of_a_list(found: dict[str, Any]) -> None:
    assert found["one vanishes"] == FOLDERS - 1
    assert found["gone"]["vaes"] == ["Wan [diffusers]"]
    assert found["gone"]["loras"] == []
    assert len(found["gone"]["prompts"]) == FOLDERS


if __name__ == "__main__":
    import sys

    print(json.dumps(list_again_and_again(Path(sys.argv[1]))))
