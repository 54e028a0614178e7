"""Folders of models as people have them, of empty files."""

from __future__ import annotations

from pathlib import Path

SHARDS = [f"diffusion_pytorch_model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "diffusion_pytorch_model.safetensors.index.json"
WHOLE = "diffusion_pytorch_model.safetensors"


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def touch_pipeline(folder: Path) -> Path:
    parts = [f"transformer/{name}" for name in (*SHARDS, INDEX)]
    return touch(
        folder, "model_index.json", f"vae/{WHOLE}", "text_encoder/model.safetensors", *parts
    )
