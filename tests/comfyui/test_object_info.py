"""What ComfyUI tells of this pack's nodes stays as saved workflows know it: object_info.json has it.

A deliberate change of a node is written anew, with the address of a ComfyUI that has the pack:

    python tests/comfyui/test_object_info.py URL > tests/comfyui/object_info.json
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from devtools.comfy_server import ComfyServer

STORED = Path(__file__).with_name("object_info.json")
FILE_LISTS = {"model_name", "low_noise_model", "vae_name", "lora_name", "file"}
"""Inputs that offer what lies in folders."""
COMFYUI_LISTS = {"scheduler"}
"""Inputs that offer what this ComfyUI has."""


def comparable(info: dict[str, Any]) -> dict[str, Any]:
    """The nodes of this pack without what depends on folders, on the pack's own folder, or on ComfyUI's version."""
    ours = {name: node for name, node in sorted(info.items()) if name.startswith("WanDist")}
    for node in ours.values():
        node.pop("python_module")
        for inputs in node["input"].values():
            for name, (kind, *options) in inputs.items():
                if name in FILE_LISTS | COMFYUI_LISTS:
                    given = dict(options[0]) if options else {}
                    given.pop("options", None)
                    given.pop("default", None)
                    inputs[name] = ["a list" if isinstance(kind, list) else kind, given]
    return ours


def fetched(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/object_info", timeout=60) as answer:
        info: dict[str, Any] = json.load(answer)
    return comparable(info)


def as_text(info: dict[str, Any]) -> str:
    return json.dumps(info, indent=1) + "\n"


def test_nodes_are_as_saved_workflows_know_them(comfy: ComfyServer) -> None:
    stored = STORED.read_text(encoding="utf-8")
    known = json.loads(stored)
    # Later versions of ComfyUI say more of a node.
    told = {
        name: {key: value for key, value in node.items() if key in known.get(name, node)}
        for name, node in fetched(comfy.url).items()
    }
    assert as_text(told) == stored


if __name__ == "__main__":
    sys.stdout.write(as_text(fetched(sys.argv[1])))
