"""What the pack asks of ComfyUI's own modules is there, or a sentence says what is missing in which version.

Attributes of modules are found in the code of comfy_wan_dist/comfyui; what it asks of objects is listed here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comfyui_child import REPO, found_beside_comfyui

FOLDER = REPO / "comfy_wan_dist" / "comfyui"
PATCHER = "a ModelPatcher"
MODEL = "the model in it"
OBJECTS: dict[str, tuple[str, ...]] = {
    PATCHER: (
        *("model", "patches", "patches_uuid", "object_patches", "weight_wrapper_patches"),
        *("injections", "load_device", "pre_run", "cleanup", "patch_hooks", "clone"),
        *("get_combined_hook_patches", "add_patches", "model_size", "loaded_size"),
    ),
    MODEL: ("diffusion_model", "memory_usage_factor", "model_sampling", "latent_format"),
}
"""What remote_model.py and patches.py use of objects, beside the modules' attributes."""
CALL = ("x", "timestep", "context", "clip_fea", "time_dim_concat", "transformer_options")
"""How ComfyUI calls Wan's transformer, by place."""
ADAPTERS = {"lora": 6, "loha": 8, "lokr": 9}
"""How many tensors a change has, as patches.py names them by their places."""


def test_comfyui_has_what_the_pack_asks_of_it(comfyui_path: Path, tmp_path: Path) -> None:
    assert found_beside_comfyui(__file__, tmp_path, comfyui_path) == []


def test_a_missing_attribute_is_said_with_the_version(comfyui_path: Path, tmp_path: Path) -> None:
    """The check finds what it is there to find."""
    code = tmp_path / "comfyui"
    code.mkdir()
    (code / "one.py").write_text(
        "import comfy.utils as utils\nimport comfy.sample\n\n"
        "utils.no_such(1)\ncomfy.sample.nor_this.at_all\ncomfy.sample.prepare_noise\n"
    )
    found = found_beside_comfyui(__file__, code, comfyui_path)
    assert sorted(line.partition(" has no ")[2] for line in found) == [
        "comfy.sample.nor_this, which one.py needs",
        "comfy.utils.no_such, which one.py needs",
    ]
    assert all(line.startswith("ComfyUI ") and line[8].isdigit() for line in found)


# ---- beside ComfyUI


def uses(source: Path) -> Iterator[str]:
    """Dotted names of ComfyUI's modules that a file uses: `comfy.utils.ProgressBar`."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    roots: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in ("comfy", "folder_paths"):
                    yield alias.name
                    local = alias.asname or alias.name.partition(".")[0]
                    roots[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "comfy":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in roots:
                yield ".".join([roots[inner.id], *reversed(parts)])


def first_missing(name: str) -> str | None:
    """The shortest part of a dotted name that is not there; what is below an instance is not looked at."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        path = ".".join(parts[:index])
        if not hasattr(found, part):
            try:
                importlib.import_module(path)
            except ImportError:
                return path
        found = getattr(found, part)
        if not (inspect.ismodule(found) or inspect.isclass(found)):
            return None
    return None


def missing_of_a_model() -> Iterator[str]:
    """What the MODEL needs beyond names of modules."""
    import comfy.ldm.wan.model
    import comfy.weight_adapter
    import torch

    from comfy_wan_dist.comfyui.patches import CarriedPatches
    from comfy_wan_dist.comfyui.remote_model import build_model
    from comfy_wan_dist.mesh.shape import WanShape

    shape = WanShape(dim=128, ffn_dim=128, num_layers=1, in_dim=48, out_dim=48)
    calls = []

    class Run:
        def __call__(self, x: Any, timesteps: Any, text: Any) -> Any:
            calls.append((tuple(x.shape), tuple(timesteps.shape), tuple(text.shape)))
            return torch.zeros_like(x)

        def close(self) -> None:
            pass

    def open_run(_patches: CarriedPatches) -> Run:
        return Run()

    patcher = build_model(shape, open_run)
    for holder, names in ((PATCHER, OBJECTS[PATCHER]), (MODEL, OBJECTS[MODEL])):
        target = patcher if holder == PATCHER else patcher.model
        yield from (f"{holder}'s {name}" for name in names if not hasattr(target, name))
    taken = list(inspect.signature(comfy.ldm.wan.model.WanModel.forward).parameters)[1:]
    if tuple(taken[: len(CALL)]) != CALL:
        yield f"a Wan transformer that takes {', '.join(CALL)} by place"
    for adapter in comfy.weight_adapter.adapters:
        source = inspect.getsource(adapter.load)
        if adapter.name in ADAPTERS and "weights = (" not in source:
            yield f"weights of a {adapter.name} in one tuple"
    clone = patcher.clone()
    clone.pre_run()
    x, text = torch.zeros(2, 48, 3, 4, 4), torch.zeros(2, 7, 4096)
    clone.model.apply_model(x, torch.tensor([0.5, 0.5]), c_crossattn=text, transformer_options={})
    clone.cleanup()
    if calls != [((2, 48, 3, 4, 4), (2,), (2, 7, 4096))]:
        yield f"a model that calls its transformer once with the latent, timesteps and text; it came {calls}"
    if patcher.model_size() > 2**20 or patcher.model.memory_required((2, 48, 3, 4, 4)) != 0:
        yield "a model that costs nothing"


if __name__ == "__main__":
    from comfy.cli_args import args

    args.cpu = True
    from comfyui_version import __version__  # type: ignore[import-not-found]

    given = Path(sys.argv[1])
    folder = given if any(given.glob("*.py")) else FOLDER
    lacks = [
        f"{name}, which {source.name} needs"
        for source in sorted(folder.glob("*.py"))
        for name in dict.fromkeys(filter(None, map(first_missing, uses(source))))
    ]
    if folder == FOLDER and not lacks:
        lacks = [f"{what}, which the MODEL of Wan Dist needs" for what in missing_of_a_model()]
    print(json.dumps([f"ComfyUI {__version__} has no {each}" for each in lacks]))
