"""Names in the lists of models, and the folders that names mean."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from model_folders import INDEX, SHARDS, WHOLE, touch, touch_pipeline

from comfy_wan_dist.model_file.offered import folder_named, listed_names


def files_below(*roots: Path) -> list[str]:
    """As ComfyUI lists them, links followed for as long as the system does."""
    found = {
        os.path.relpath(os.path.join(folder, name), root)
        for root in roots
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
    }
    return sorted(name for name in found if name.endswith((".safetensors", ".pth")))


def listed(
    *roots: Path, pipelines: Sequence[Path] = (), component: str = "transformer"
) -> list[str]:
    return listed_names(
        files_below(*roots),
        [str(root) for root in roots],
        [str(root) for root in pipelines],
        component=component,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A models folder with some of everything."""
    root = tmp_path / "models"
    touch(root, "one.safetensors", "sub/two.safetensors", *SHARDS, INDEX)
    touch(root / "Official", *SHARDS, INDEX, "Wan2.2_VAE.pth", "google/umt5/spiece.safetensors")
    touch(root / "part", WHOLE, "config.json")
    touch(root / "incomplete", *SHARDS)
    touch_pipeline(root / "org" / "Pipeline")
    return root


def test_folders_stand_for_their_files(root: Path) -> None:
    assert listed(root) == [
        "Official/",
        "org/Pipeline/",
        "part/",
        "Official/Wan2.2_VAE.pth",
        "Official/google/umt5/spiece.safetensors",
        *SHARDS,  # of the models folder itself
        *(f"incomplete/{name}" for name in SHARDS),
        "one.safetensors",
        "sub/two.safetensors",
    ]


def test_pipeline_is_listed_for_what_it_has(root: Path, tmp_path: Path) -> None:
    pipelines = tmp_path / "diffusers"
    touch_pipeline(pipelines / "Wan")
    touch(pipelines / "deep" / "Image", "model_index.json", f"unet/{WHOLE}", f"vae/{WHOLE}")
    assert listed(pipelines=[pipelines]) == ["Wan [diffusers]"]
    both = ["Wan [diffusers]", "deep/Image [diffusers]"]
    assert listed(pipelines=[pipelines], component="vae") == both
    assert listed(root, pipelines=[pipelines])[:4] == [
        "Official/",
        "org/Pipeline/",
        "part/",
        both[0],
    ]


def test_variant_of_diffusers_is_listed_as_a_folder(tmp_path: Path) -> None:
    shards = [name.replace("model-", "model.fp16-") for name in SHARDS]
    touch(tmp_path / "fp16", *shards, "diffusion_pytorch_model.safetensors.index.fp16.json")
    assert listed(tmp_path) == ["fp16/"]


def test_every_listed_folder_is_found(root: Path, tmp_path: Path) -> None:
    pipelines, other = tmp_path / "diffusers", tmp_path / "other"
    touch_pipeline(pipelines / "Official")
    touch(other / "Only here", *SHARDS, INDEX)
    roots = [str(other), str(root)]
    names = listed(other, root, pipelines=[pipelines])
    folders = {name: folder_named(name, roots, [str(pipelines)]) for name in names}
    assert {name: folder for name, folder in folders.items() if folder} == {
        "Official/": f"{root}/Official",
        "Only here/": f"{other}/Only here",
        "org/Pipeline/": f"{root}/org/Pipeline",
        "part/": f"{root}/part",
        "Official [diffusers]": f"{pipelines}/Official",
    }
    assert folder_named("Official [diffusers]/vae", roots, [str(pipelines)]) is None
    for name in ("Official/transformer [diffusers]", "org/Pipeline/transformer"):
        path = folder_named(name, roots, [str(pipelines)])
        assert path is not None
        assert Path(path, SHARDS[0]).exists()


@pytest.mark.parametrize(
    "name",
    ["..", "../secret", "/secret", "//secret", "sub/../../secret", ".", "/", "", "gone/", "\0"],
)
@pytest.mark.parametrize("label", ["", " [diffusers]"])
def test_names_lead_to_folders_below_the_roots_only(root: Path, name: str, label: str) -> None:
    touch(root.parent / "secret", WHOLE)
    assert folder_named(name + label, [str(root)], [str(root)]) is None


def test_links_in_a_circle_list_each_folder_once(tmp_path: Path) -> None:
    root = tmp_path / "models"
    touch_pipeline(root / "a" / "Pipeline")
    (root / "a" / "circle").symlink_to(root)
    (root / "self").symlink_to("self")
    names = listed(root)  # ComfyUI lists the files again and again
    assert [name for name in names if name.endswith("/")] == ["a/Pipeline/"]
    # Where ways fork at each turn ComfyUI would not come to an end.
    (root / "b").symlink_to(root / "a")
    assert listed(pipelines=[root]) == ["a/Pipeline [diffusers]"]


def test_linked_folder_is_listed(tmp_path: Path) -> None:
    disk, root = tmp_path / "disk", tmp_path / "models"
    touch_pipeline(disk / "Pipeline")
    root.mkdir()
    (root / "linked").symlink_to(disk / "Pipeline")
    assert listed(root) == ["linked/"]
    assert listed(pipelines=[root]) == ["linked [diffusers]"]
