"""The product files that one job runs through: `python -m devtools.trace_files sampler|gguf`.

    sampler   a warm run, from Wan Dist Sampler's `execute` to the latent it returns, in ComfyUI and in a rank
    gguf      the weights of a GGUF file, from `load_weights` to its end, in a rank

Covered: files entered by a call of one of their functions, each once, whichever the thread; first those that are given
or give back the job's data (`traced/sitecustomize.py` says what that is), in that order; a real ComfyUI on the CPU, one
rank, a toy model. Not covered: functions that already ran when it began, such as
a rank's loop, unless they call others of their file; and the launcher, which does nothing meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from comfy_wan_dist.model_file.conditioning import TEXT_DIM, save
from devtools.checkpoints import TINY_TRANSFORMER, transformer_weights, write_transformer
from devtools.comfy_server import PACK_FOLDER, ComfyServer, find_comfyui

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# In which process with which function the list begins; "" is at once.
WINDOWS: Mapping[str, Mapping[str, str]] = {
    "sampler": {"comfyui": "execute", "rank": ""},
    "gguf": {"rank": "load_weights"},
}
LATENT = (1, TINY_TRANSFORMER.out_dim, 2, 4, 4)
Graph = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file, with the processes that entered it, first come first, and whether it was handed the job's data."""

    path: str
    roles: tuple[str, ...]
    has_data: bool


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m devtools.trace_files", description=__doc__)
    parser.add_argument("what", choices=sorted(WINDOWS))
    what = parser.parse_args(arguments).what
    try:
        entries = trace(what)
    except FileNotFoundError as error:  # no ComfyUI is set up
        parser.exit(1, f"{error}\n")
    way = [entry for entry in entries if entry.has_data]
    others = [entry for entry in entries if not entry.has_data]
    print("handed the job's data, in the order of the data:")
    for number, entry in enumerate(way, 1):
        print(f"{number:3} {entry.path:56} {', '.join(entry.roles)}")
    print("asked on the way:")
    for entry in sorted(others, key=lambda entry: entry.path):
        print(f"    {entry.path:56} {', '.join(entry.roles)}")
    print(f"{len(way)} files on the way, {len(others)} asked")
    return 0


def trace(what: str) -> list[Entry]:
    """Run the job in a ComfyUI of its own. Raises ComfyServerError, RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        base, lists = Path(folder) / "base", Path(folder) / "lists"
        lists.mkdir()
        graph = write_files(base, is_gguf=what == "gguf")
        env = {
            "PYTHONPATH": str(HERE / "traced"),
            "TRACE_FOLDER": str(lists),
            "TRACE_ROOT": str(ROOT),
        }
        with ComfyServer(
            comfyui=find_comfyui(ROOT), base=base, packs={PACK_FOLDER: ROOT}, env=env
        ) as server:
            if what == "sampler":
                run(server, graph, seed=1)  # the group starts and loads the model
            window = lists / "window"
            window.with_suffix(".new").write_text(json.dumps(WINDOWS[what]))
            window.with_suffix(".new").rename(window)
            run(server, graph, seed=2)
            window.unlink()
        return read_lists(lists)


def write_files(base: Path, *, is_gguf: bool) -> Graph:
    """A toy model and a prompt below `base`; returns the graph that samples with them."""
    models, inputs = base / "models" / "diffusion_models", base / "input"
    for folder in (models, inputs):
        folder.mkdir(parents=True)
    if is_gguf:
        from devtools.quantised import write_gguf

        write_gguf(models / "toy.gguf", transformer_weights(TINY_TRANSFORMER, seed=1), ("Q8_0",))
    else:
        write_transformer(models / "toy.safetensors", TINY_TRANSFORMER, seed=1)
    generator = torch.Generator().manual_seed(2)
    save(inputs / "prompt.safetensors", torch.randn(1, 8, TEXT_DIM, generator=generator))
    latent = {"latent_tensor": torch.zeros(LATENT), "latent_format_version_0": torch.zeros(0)}
    save_file(latent, inputs / "start.latent")
    model = {
        "model_name": f"toy.{'gguf' if is_gguf else 'safetensors'}",
        "dtype": "float32",
        "mesh": "single",
        "devices": "cpu:1",
        "compile": False,
    }
    sampling = {"steps": 2, "cfg": 5.0, "sampler_name": "uni_pc", "scheduler": "simple"}
    links = {"model": ["model", 0], "positive": ["prompt", 0], "negative": ["prompt", 0]}
    return {
        "model": node("WanDistLoadModel", **model),
        "prompt": node("WanDistLoadConditioning", file="prompt.safetensors [input]"),
        "latent": node("LoadLatent", latent="start.latent"),
        "sampler": node(
            "WanDistSampler",
            **links,
            **sampling,
            latent_image=["latent", 0],
            shift=8.0,
            denoise=1.0,
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="latents/trace"),
    }


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def run(server: ComfyServer, graph: Graph, *, seed: int) -> None:
    graph["sampler"]["inputs"]["seed"] = seed
    result = server.run(graph)
    if result.status != "success":
        raise RuntimeError(f"the job ended with {result.status}\n{result.error}")


def read_lists(folder: Path) -> list[Entry]:
    """Entries of all processes: by the time of the first data, else of the first call."""
    found = []
    for path in folder.glob("*.[0-9]*"):
        for line in path.read_text().splitlines():
            when, place = line.split(" ", 1)
            found.append((int(when), place, path.stem))
    roles: dict[str, list[str]] = {}
    moments: dict[str, int] = {}
    with_data = {place[1:] for _, place, _ in found if place.startswith("+")}
    for moment, place, role in sorted(found):
        name = place.removeprefix("+")
        entered = roles.setdefault(name, [])
        if role not in entered:
            entered.append(role)
        if place.startswith("+") or name not in with_data:
            moments.setdefault(name, moment)
    return [
        Entry(path=name, roles=tuple(roles[name]), has_data=name in with_data)
        for name in sorted(moments, key=lambda name: moments[name])
    ]


if __name__ == "__main__":
    sys.exit(main())
