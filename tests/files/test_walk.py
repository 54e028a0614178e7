"""Folders that are read again only once they have changed: what links, times and many changes do to that."""

from __future__ import annotations

import os
from pathlib import Path

from comfy_wan_dist.model_file import walk
from comfy_wan_dist.model_file.walk import walk_models


def found(root: Path) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(path, name), root)
        for path, _, files in walk_models(str(root), follow_links=True)
        for name in files
    )


def folder_with(path: Path, name: str) -> Path:
    path.mkdir(parents=True)
    (path / name).touch()
    os.utime(path, (1, 1))
    return path


def test_a_link_that_leads_to_another_folder_of_the_same_time_is_noticed(tmp_path: Path) -> None:
    """As rsync and images with fixed times leave them."""
    one, two = (folder_with(tmp_path / name, f"{name}.safetensors") for name in ("one", "two"))
    root = tmp_path / "models"
    root.mkdir()
    link = root / "current"
    link.symlink_to(one)
    os.utime(root, (1, 1))
    assert found(root) == ["current/one.safetensors"]
    link.unlink()
    link.symlink_to(two)
    os.utime(root, (1, 1))
    assert found(root) == ["current/two.safetensors"]


def test_a_link_whose_folder_is_mounted_later_is_entered(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    (root / "nas").symlink_to(tmp_path / "nas")
    (root / "file.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert found(root) == ["file.safetensors"]
    folder_with(tmp_path / "nas", "model.gguf")
    assert found(root) == ["file.safetensors", "nas/model.gguf"]


def test_a_folder_that_changes_is_remembered_once(tmp_path: Path) -> None:
    before = walk._remembered.cache_info().currsize
    for index in range(20):
        (tmp_path / f"{index}.safetensors").touch()
        os.utime(tmp_path, (index, index))
        assert len(found(tmp_path)) == index + 1
    assert walk._remembered.cache_info().currsize == before + 1
