"""What the nodes' lists offer of ComfyUI's folders, in a process that has ComfyUI's own `folder_paths`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from comfyui_child import found_beside_comfyui
from model_folders import INDEX, SHARDS, WHOLE, touch, touch_pipeline


def print_lists(base: Path) -> None:
    """The lists, and where what they offer lies; run in a process of its own."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import folder_paths

    for folder in ("diffusion_models", "vae", "diffusers", "loras"):
        folder_paths.add_model_folder_path(folder, str(base / folder), is_default=True)
    from comfy_wan_dist.comfyui.folders import list_loras, list_models, model_path

    lists = {
        "loras": list_loras(),
        **{each: list_models(each) for each in ("diffusion_models", "vae")},
    }
    paths = {
        f"{folder} {name}": model_path(folder, name)
        for folder in ("diffusion_models", "vae")
        for name in lists[folder]
    }
    print(json.dumps([lists, paths]))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    touch_pipeline(base / "diffusion_models" / "org" / "Wan")
    touch_pipeline(base / "diffusers" / "Wan")
    touch(base / "diffusion_models" / "shards", *SHARDS, INDEX)
    touch(base / "diffusion_models", "a.safetensors", "a.ckpt", "b.pt", "c.bin", "d.pth", "e.sft")
    touch(base / "diffusion_models", "A.SAFETENSORS", "B.PT", "F.Gguf")
    touch(base / "diffusion_models", "f.gguf", *(f"g-0000{n}-of-00002.gguf" for n in (1, 2)))
    touch(base / "vae", "a.safetensors", "a.pt", f"part/{WHOLE}", "f.gguf")
    touch(base / "loras", "A.SafeTensors", "a.safetensors", "b.pt", "c.ckpt", "d.sft", "e.bin")
    return base


def test_lists_offer_what_would_not_be_refused_for_its_kind(base: Path, comfyui_path: Path) -> None:
    lists, paths = found_beside_comfyui(__file__, base, comfyui_path)
    assert {name: sorted(names) for name, names in lists.items()} == {
        "loras": ["A.SafeTensors", "a.safetensors", "d.sft"],
        "diffusion_models": [
            "A.SAFETENSORS",
            "F.Gguf",
            "Wan [diffusers]",
            "a.safetensors",
            "e.sft",
            "f.gguf",
            "g-00001-of-00002.gguf",
            "org/Wan/",
            "shards/",
        ],
        "vae": ["Wan [diffusers]", "a.safetensors", "org/Wan [diffusers]", "part/"],
    }
    assert paths["vae org/Wan [diffusers]"] == str(base / "diffusion_models" / "org" / "Wan")
    assert paths["vae Wan [diffusers]"] == str(base / "diffusers" / "Wan")


if __name__ == "__main__":
    print_lists(Path(sys.argv[1]))
