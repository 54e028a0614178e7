"""Files as public tools write them, loaded by a stock ComfyUI and here: the same values, or a row of differences.md.

`pytest -s` prints the matrix. The builders compute what a file's values are on their own, so that both are compared
with a third; of GGUF, which stock does not read, the third is the `gguf` package. Not covered: meshes, and sampling.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfyui_child import REPO, run_beside_comfyui
from lora_programs import merged_weights
from public_checkpoints import CHECKPOINTS, Checkpoint
from public_loras import LINEARS, LORAS, SHAPE, SHAPES, Lora
from rank_programs import load_shard
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.lora import HALVES
from devtools.checkpoints import transformer_weights
from devtools.loras import merged
from devtools.mesh_runs import lora_spec, model_spec, relative_error
from workers.parallel.groups import PlaneGroups
from workers.quant.packed import packed_weights

Tensors = dict[str, Tensor]
Name = tuple[str, str]
STRENGTH = 0.7
LIMIT = 1e-6
TOO_OLD = "too old"


@dataclass(kw_only=True)
class Files:
    """What lies in `folder`, and what stock made of it. rows: of the matrix, as the tests find them."""

    folder: Path
    loras: Mapping[Name, Lora]
    checkpoints: Mapping[Name, Checkpoint]
    rows: dict[Name, str] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        return self.folder / "base.safetensors"

    def stock(self, path: Path) -> Tensors | None:
        """The values that stock has, None if it raised or has no loader. Skips the test if this one is too old."""
        results = json.loads((self.folder / "stock.json").read_text())
        found = results.get(str(path))
        if found == TOO_OLD:
            pytest.skip("this ComfyUI does not know the form yet")
        return None if found is None else load_file(found)


def folder_of(folder: Path, name: Name) -> Path:
    return folder / " - ".join(name).replace(",", "")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, comfyui_path: Path) -> Iterator[Files]:
    folder = tmp_path_factory.mktemp("layouts")
    weights = transformer_weights(SHAPE, seed=30)
    save_file(weights, folder / "base.safetensors")
    loras, checkpoints = {}, {}
    for name, build in LORAS.items():
        folder_of(folder, name).mkdir()
        loras[name] = build()
        path = folder_of(folder, name) / "lora.safetensors"
        tensors = {key: value.clone() for key, value in loras[name].tensors.items()}
        save_file(tensors, path, metadata=dict(loras[name].metadata))
    for name, write in CHECKPOINTS.items():
        folder_of(folder, name).mkdir()
        checkpoints[name] = write(folder_of(folder, name), weights)
    given = {
        str(each.path): each.needs
        for each in checkpoints.values()
        if each.path.suffix == ".safetensors"
    }
    (folder / "checkpoints.json").write_text(json.dumps(given))
    run_beside_comfyui(__file__, folder, comfyui_path)
    files = Files(folder=folder, loras=loras, checkpoints=checkpoints)
    yield files
    rows = [files.rows[name] for name in (*LORAS, *CHECKPOINTS) if name in files.rows]
    print("\n", f"| {' | '.join(HEAD)} |", "| --- " * len(HEAD) + "|", *rows, sep="\n")


HEAD = (
    "publisher",
    "file kind",
    "stock loads",
    "here loads",
    "tensors, stock / here",
    "largest difference from stock",
    "from the file's own values",
)


def row(name: Name, *cells: str) -> str:
    return f"| {' | '.join((*name, *cells))} |"


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """As a part of the largest value of each."""
    return max(relative_error(ours[name], value) for name, value in theirs.items())


def assert_listed(difference: str) -> None:
    lines = (REPO / "docs" / "differences.md").read_text().splitlines()
    listed = [line for line in lines if line.startswith(f"| {difference}")]
    assert len(listed) == 1, difference
    assert "test_public_layouts.py" in listed[0]


# ---- LoRA


@pytest.mark.parametrize("name", LORAS, ids=": ".join)
def test_lora_is_merged(name: Name, files: Files) -> None:
    lora, base = files.loras[name], load_file(files.base)
    path = folder_of(files.folder, name) / "lora.safetensors"
    spec = lora_spec(path, STRENGTH)
    experts = [(lora.parts, "")]
    if lora.second is not None:
        experts = list(zip((lora.parts, lora.second), HALVES, strict=True))
    stock = files.stock(path)
    assert stock is not None
    for parts, half in experts:
        true = merged(base, (parts, STRENGTH))
        ours = merged_weights(model_spec(files.base), replace(spec, half=half))
        own = largest_difference(ours, true)
        assert own < LIMIT
        for key, value in stock.items():  # what it merges at all
            assert relative_error(ours[key], value) < LIMIT, key
        counts = [
            sum(not torch.equal(values[key], base[key]) for key in base)
            for values in (base | stock, ours, true)
        ]
        assert counts[1] == counts[2]
        difference = largest_difference(ours, base | stock)
        if lora.difference:
            assert_listed(lora.difference)
            assert counts[0] <= counts[1]
        else:
            assert difference < LIMIT
            assert counts[0] == counts[1]
    loads = "yes" if counts[0] == counts[1] else "a part" if counts[0] else "nothing of it"
    tensors = f"{counts[0]} / {counts[1]}"
    files.rows[name] = row(name, loads, "yes", tensors, f"{difference:.1e}", f"{own:.1e}")


# ---- checkpoints


def loaded_values(path: Path) -> Tensors:
    """What one rank holds of it, by official name."""
    plane = PlaneGroups(layout=MeshDegrees(), rank=0)
    model, _ = load_shard(plane, str(path), dtype=torch.float32)
    packed, plain = packed_weights(model), dict(model.named_parameters())
    with torch.inference_mode():
        return {
            name: (packed[name]() if name in packed else plain[name].detach()).clone()
            for name in SHAPES
        }


def lacks_scales(checkpoint: Checkpoint, stock: Tensors) -> bool:
    """Whether stock takes the stored numbers for values, of a file with scales."""
    stored = load_file(checkpoint.path)
    return any("scale" in name for name in stored) and all(
        torch.equal(stored[name].float(), stock[name]) for name in LINEARS
    )


@pytest.mark.parametrize("name", CHECKPOINTS, ids=": ".join)
def test_checkpoint_is_loaded(name: Name, files: Files) -> None:
    checkpoint = files.checkpoints[name]
    stock = files.stock(checkpoint.path)
    loads = (
        "no" if stock is None else f"yes{', without its scales' * lacks_scales(checkpoint, stock)}"
    )
    if checkpoint.values is None:
        assert_listed(checkpoint.difference)
        with pytest.raises(ModelFileError) as caught:
            loaded_values(checkpoint.path)
        assert "\n" not in str(caught.value)
        files.rows[name] = row(name, loads, "refused", f"{len(stock or ())} / 0", "", "")
        return
    ours = loaded_values(checkpoint.path)
    for key, value in checkpoint.values.items():
        assert torch.equal(ours[key], value), key
    other = {} if stock is None else {key: v for key, v in stock.items() if not v.equal(ours[key])}
    if checkpoint.difference:
        assert_listed(checkpoint.difference)
        if checkpoint.is_rounded:
            for key, value in other.items():
                assert torch.equal(ours[key].to(torch.float8_e4m3fn).float(), value), key
    else:
        assert stock is not None
        assert not other
        assert stock.keys() == ours.keys()
    difference = f"{largest_difference(ours, stock):.1e}" if stock is not None else ""
    own = largest_difference(ours, checkpoint.values)
    if checkpoint.path.suffix == ".gguf":
        loads = "no loader; the gguf package"
    files.rows[name] = row(
        name, loads, "yes", f"{len(stock or ())} / {len(ours)}", difference, f"{own:.1e}"
    )


# ---- the matrix


def test_no_layout_is_counted_twice(files: Files) -> None:
    """Two that differ differ in names, types or shapes of tensors, or in what the metadata says."""
    layouts = {}
    for name in (*LORAS, *CHECKPOINTS):
        path = folder_of(files.folder, name) / "lora.safetensors"
        header = read_model_file(str(path if name in LORAS else files.checkpoints[name].path))
        tensors = frozenset((key, e.dtype, e.shape) for key, e in header.entries.items())
        layouts[tensors, tuple(sorted(header.metadata))] = name
    assert len(layouts) == len(LORAS) + len(CHECKPOINTS) >= 30
    assert len({publisher for publisher, _ in layouts.values()}) == 12


# ---- stock


def write_comfyui_results(folder: Path) -> None:
    """stock.json: by path where the values are that stock has, if it loads the file; run in a process of its own."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.lora
    import comfy.lora_convert
    import comfy.ops
    import comfy.sd
    import comfy.utils

    logging.disable(logging.WARNING)
    weights = load_file(folder / "base.safetensors")
    model = SimpleNamespace(
        state_dict=lambda: {f"diffusion_model.{name}": value for name, value in weights.items()},
        model_config=SimpleNamespace(unet_config={"image_model": "wan2.1"}),
    )
    keys = comfy.lora.model_lora_keys_unet(model, {})
    results = {}
    for path in sorted(folder.glob("*/lora.safetensors")):
        lora = comfy.lora_convert.convert_lora(comfy.utils.load_torch_file(str(path)))
        changed = {}
        for key, patch in comfy.lora.load_lora(lora, keys).items():
            name = key.removeprefix("diffusion_model.")
            patches = [(STRENGTH, patch, 1.0, None, None)]
            changed[name] = comfy.lora.calculate_weight(patches, weights[name].clone(), key)
        results[str(path)] = str(path.with_suffix(".stock"))
        save_file(changed, results[str(path)])
    for text, needs in json.loads((folder / "checkpoints.json").read_text()).items():
        if needs and not hasattr(comfy.ops, needs):
            results[text] = TOO_OLD
            continue
        with contextlib.suppress(Exception):
            options = {"dtype": torch.float32}
            loaded = comfy.sd.load_diffusion_model(text, model_options=options)
            stored = stock_values(loaded.model.diffusion_model)
            results[text] = str(Path(text).with_suffix(".stock"))
            save_file(stored, results[text])
    (folder / "stock.json").write_text(json.dumps(results))


def stock_values(model: torch.nn.Module) -> Tensors:
    """A stock model's parameters in float32, scaled where they have a scale."""
    values = {}
    for path, module in model.named_modules():
        for leaf in ("weight", "bias", "modulation"):
            value = getattr(module, leaf, None)
            if not isinstance(value, Tensor):
                continue
            value = value.data
            if leaf == "weight" and hasattr(module, "convert_weight"):
                # A ComfyUI that has no tensors of its own for this gives plain ones to it in another type.
                given = value.float() if type(value) is Tensor else value
                value = module.convert_weight(given)
            values[f"{path}.{leaf}"] = value.float().contiguous()
    return values


if __name__ == "__main__":
    write_comfyui_results(Path(sys.argv[1]))
