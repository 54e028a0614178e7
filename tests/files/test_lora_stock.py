"""LoRA files as their tools write them: merged as a stock ComfyUI merges them, and what it skips is skipped and named.

Covered: types of numbers, changes of another size, keys of another model, and files whose keys stock does not know for
Wan, which are compared with the same tensors under names that it knows. Not covered: meshes (test_lora.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfyui_child import REPO, run_beside_comfyui
from lora_headers import REFUSED
from lora_programs import merged_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.jobs.handle import BOTH, LOW_NOISE, ModelHandle, resolve_model
from comfy_wan_dist.mesh.dtypes import BY_CODE
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.lora import read_lora
from devtools.checkpoints import transformer_weights
from devtools.loras import PartsMaker, spelled
from devtools.mesh_runs import lora_spec, model_spec, relative_error

Tensors = dict[str, Tensor]

SHAPE = WanShape(dim=128, ffn_dim=64, num_layers=2, in_dim=16, out_dim=16, text_dim=16, freq_dim=8)
SHAPES = expected_parameters(SHAPE)
STRENGTH = 0.7
MAKE = PartsMaker(SHAPES, seed=21)
Q = "diffusion_model.blocks.0.self_attn.q"
OUT = "blocks.0.self_attn.o.weight"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def pair(rows: int, *columns: int) -> Tensors:
    size = (rows, 4, *(1 for _ in columns[1:]))
    return {"up": torch.randn(size) * 0.1, "down": torch.randn(4, *columns) * 0.1}


def plain() -> Tensors:
    names = (OUT, "blocks.1.ffn.0.weight", "blocks.1.cross_attn.k.weight")
    return spelled({name: MAKE.low_rank(name) for name in names}, "comfyui")


def with_alpha(alpha: Tensor) -> Tensors:
    name = "blocks.0.self_attn.q.weight"
    return spelled({name: MAKE.low_rank(name, alpha=None) | {"alpha": alpha}}, "comfyui")


def every_kind(dtype: torch.dtype) -> Tensors:
    parts = {
        OUT: MAKE.low_rank(OUT) | MAKE.bias(OUT),
        "blocks.1.norm3.weight": MAKE.difference("blocks.1.norm3.weight"),
        "blocks.0.modulation": MAKE.difference("blocks.0.modulation"),
        "blocks.0.ffn.0.weight": MAKE.hadamard("blocks.0.ffn.0.weight"),
        "blocks.1.ffn.2.weight": MAKE.kronecker("blocks.1.ffn.2.weight", factored=True),
        "patch_embedding.weight": MAKE.low_rank("patch_embedding.weight"),
    }
    return {key: value.to(dtype) for key, value in spelled(parts, "comfyui").items()}


def beside_plain(name: str, parts: Tensors) -> Callable[[], Tensors]:
    """A change with a second one that any ComfyUI merges."""
    return lambda: plain() | spelled({name: parts}, "comfyui")


def lengths(*shape: int) -> Tensors:
    return {"dora_scale": 1 + torch.rand(shape)}


def patches_by_dora(*shape: int) -> Callable[[], Tensors]:
    return beside_plain("patch_embedding.weight", pair(128, 16, 1, 2, 2) | lengths(*shape))


def kronecker(alpha: float) -> Tensors:
    return MAKE.kronecker(OUT, factored=False) | {"alpha": torch.tensor(alpha, dtype=torch.float16)}


CASES: dict[str, Callable[[], Tensors]] = {
    "plain": plain,
    **{
        f"alpha in {str(dtype).removeprefix('torch.')}": lambda dtype=dtype: with_alpha(  # type: ignore[misc]
            torch.tensor(3, dtype=dtype)
        )
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, *FP8)
    },
    "small alpha in fp8": lambda: with_alpha(torch.tensor(-0.0117).to(torch.float8_e4m3fn)),
    **{
        f"all in {str(dtype).removeprefix('torch.')}": lambda dtype=dtype: every_kind(dtype)  # type: ignore[misc]
        for dtype in FP8
    },
    "patches of image-to-video, difference": lambda: {
        **plain(),
        "diffusion_model.patch_embedding.diff": torch.randn(128, 36, 1, 2, 2),
        "diffusion_model.patch_embedding.diff_b": torch.randn(128) * 0.1,
    },
    "patches of image-to-video, pair": lambda: {
        **plain(),
        **spelled({"patch_embedding.weight": pair(128, 36, 1, 2, 2)}, "comfyui"),
    },
    "keys of Wan2.1 image-to-video": lambda: {
        **plain(),
        **spelled(
            {
                "blocks.0.cross_attn.k_img.weight": pair(128, 128) | {"bias": torch.randn(128)},
                "blocks.0.cross_attn.v_img.weight": pair(128, 128),
                "img_emb.proj.1.weight": pair(1280, 1280),
                "img_emb.proj.4.weight": pair(128, 1280) | {"bias": torch.randn(128)},
            },
            "comfyui",
        ),
        "diffusion_model.blocks.0.cross_attn.norm_k_img.diff": torch.randn(128),
        "diffusion_model.img_emb.proj.0.diff": torch.randn(1280),
        "diffusion_model.img_emb.emb_pos.diff": torch.randn(1, 514, 1280),
    },
    "other sizes": lambda: {
        **plain(),
        **spelled(
            {
                "text_embedding.0.weight": pair(128, 4096) | {"bias": torch.randn(128) * 0.1},
                "blocks.0.ffn.0.weight": pair(96, 128) | {"bias": torch.randn(96)},
                "head.head.weight": pair(192, 128) | {"alpha": torch.tensor(2.0)},
                "blocks.0.ffn.2.weight": {
                    "lokr_w1": torch.randn(8, 4),
                    "lokr_w2": torch.randn(16, 24),
                },
            },
            "comfyui",
        ),
        "diffusion_model.head.modulation.diff": torch.randn(1, 2, 64),
        "diffusion_model.blocks.1.norm3.diff": torch.randn(64),
    },
    "another width in one of several": beside_plain(
        "blocks.0.self_attn.q.weight", pair(256, 256) | {"bias": torch.randn(64)}
    ),
    # As many values in other rows.
    "a modulation by its rows": beside_plain("blocks.0.modulation", pair(6, 128)),
    "a bias in a row": beside_plain("blocks.0.self_attn.q.bias", pair(1, 128)),
    "a norm in a row": beside_plain("blocks.0.norm3.weight", pair(1, 128)),
    "columns for rows": beside_plain(
        "blocks.0.ffn.0.weight", pair(128, 64) | {"alpha": torch.tensor(3.0)}
    ),
    "columns for rows, Hadamard": beside_plain(
        "blocks.0.ffn.0.weight",
        {
            f"hada_w{number}_{half}": torch.randn(size)
            for number in (1, 2)
            for half, size in (("a", (128, 2)), ("b", (2, 64)))
        },
    ),
    "columns for rows, Kronecker": beside_plain(
        "blocks.0.ffn.0.weight", {"lokr_w1": torch.randn(16, 8), "lokr_w2": torch.randn(8, 8)}
    ),
    "factors of many dims": beside_plain(
        "blocks.0.ffn.0.weight",
        {"up": torch.randn(64, 4, 1, 1, 1, 1), "down": torch.randn(4, 128, 1, 1, 1, 1)},
    ),
    "DoRA of a convolution's rows": patches_by_dora(128, 1, 1, 1, 1),
    "DoRA of a convolution's columns": patches_by_dora(1, 16, 1, 1, 1),
    "DoRA of a convolution in two dims": patches_by_dora(128, 1),
    "DoRA of a matrix in five dims": beside_plain(
        "blocks.0.ffn.0.weight", pair(64, 128) | lengths(64, 1, 1, 1, 1)
    ),
    "DoRA to too few lengths": beside_plain(
        "blocks.0.ffn.0.weight", pair(64, 128) | lengths(1, 64)
    ),
    "DoRA of a bias": beside_plain("blocks.0.self_attn.q.bias", pair(128, 1) | lengths(128, 1)),
    "DoRA of a modulation": beside_plain("blocks.0.modulation", pair(1, 768) | lengths(1, 1)),
    "beside what nothing is known of": lambda: {
        **plain(),
        f"{Q}.on_input": torch.tensor(True),
        "strange": torch.ones(2, dtype=torch.complex64),
        "stranger": torch.ones(2).to(torch.float8_e8m0fnu),
    },
}

# Files with keys that stock does not know for Wan: ours, and the same with keys that it knows.
RENAMED: dict[str, tuple[Tensors, Tensors]] = {}
for _alpha in (1.0, 9984.0, float("inf")):
    _parts = kronecker(_alpha)
    RENAMED[f"SimpleTuner's LoKr with alpha {_alpha:g}"] = (
        {f"lycoris_blocks_0_attn1_to_out_0.{end}": value for end, value in _parts.items()},
        spelled({OUT: _parts}, "comfyui"),
    )
_modulations = {
    name: torch.randn(SHAPES[name]) * 0.1 for name in ("blocks.1.modulation", "head.modulation")
}
RENAMED["LightX2V's diff_m"] = (
    {
        f"diffusion_model.{name.replace('modulation', 'diff_m')}": value
        for name, value in _modulations.items()
    },
    {f"diffusion_model.{name}.diff": value for name, value in _modulations.items()},
)
_parts = MAKE.low_rank(OUT, alpha=None)
RENAMED["names of several kinds"] = (
    {
        "diffusion_model.blocks.0.self_attn.o.lora_up.weight": _parts["up"],
        "lora_unet_blocks_0_self_attn_o.lora_down.weight": _parts["down"],
        "transformer.blocks.0.attn1.to_out.0.alpha": torch.tensor(3.0),
        "diffusion_model.blocks.0.norm3.b_norm": torch.ones(128),
    },
    spelled({OUT: _parts | {"alpha": torch.tensor(3.0)}}, "comfyui")
    | {"diffusion_model.blocks.0.norm3.diff_b": torch.ones(128)},
)


def write_files(folder: Path) -> None:
    """model.safetensors, for each case what we are given, and below stock/ what stock is given."""
    save_file(transformer_weights(SHAPE, seed=20), folder / "model.safetensors")
    (folder / "stock").mkdir()
    both = {name: (tensors, tensors) for name, make in CASES.items() for tensors in (make(),)}
    for name, (ours, theirs) in {**both, **RENAMED}.items():
        save_file(ours, folder / f"{name}.safetensors")
        save_file(theirs, folder / "stock" / f"{name}.safetensors")
    (folder / "refused").mkdir()
    for name, (entries, _) in REFUSED.items():
        tensors = {
            key: torch.ones(entry.shape).to(getattr(torch, BY_CODE[entry.dtype].name))
            for key, entry in entries.items()
        }
        save_file(tensors, folder / "refused" / f"{name}.safetensors")


def write_comfyui_results(folder: Path) -> None:
    """Below stock/ the merged parameters and what was logged, of each case; run in a process of its own.

    Of the files that we refuse, the names of those that it runs with.
    """
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.lora
    import comfy.lora_convert
    import comfy.utils

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    weights = load_file(folder / "model.safetensors")
    model = SimpleNamespace(
        state_dict=lambda: {f"diffusion_model.{name}": value for name, value in weights.items()},
        model_config=SimpleNamespace(unet_config={"image_model": "wan2.1"}),
    )
    keys = comfy.lora.model_lora_keys_unet(model, {})

    def merge(path: Path) -> Tensors:
        lora = comfy.lora_convert.convert_lora(comfy.utils.load_torch_file(str(path)))
        merged = dict(weights)
        for key, patch in comfy.lora.load_lora(lora, keys).items():
            name = key.removeprefix("diffusion_model.")
            patches = [(STRENGTH, patch, 1.0, None, None)]
            merged[name] = comfy.lora.calculate_weight(patches, weights[name].clone(), key)
        return merged

    logs = {}
    for path in sorted((folder / "stock").glob("*.safetensors")):
        said.clear()
        save_file(merge(path), path.with_suffix(".merged"))
        logs[path.stem] = list(said)
    (folder / "logs.json").write_text(json.dumps(logs))
    runs = []
    for path in (folder / "refused").glob("*.safetensors"):
        with contextlib.suppress(Exception):
            merge(path)
            runs.append(path.stem)
    (folder / "runs.json").write_text(json.dumps(runs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, comfyui_path: Path) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    write_files(folder)
    run_beside_comfyui(__file__, folder, comfyui_path)
    return folder


def assert_merged(folder: Path, name: str, actual: Mapping[str, Tensor]) -> None:
    expected = load_file(folder / "stock" / f"{name}.merged")
    base = load_file(folder / "model.safetensors")
    assert any(not torch.equal(expected[key], base[key]) for key in base)
    for key, value in expected.items():
        assert relative_error(actual[key], value) < 1e-6, key
        assert torch.equal(value, base[key]) == torch.equal(actual[key], base[key]), key


@pytest.mark.parametrize("case", [*CASES, *RENAMED])
def test_file_is_merged_as_stock_does(case: str, folder: Path) -> None:
    lora = lora_spec(folder / f"{case}.safetensors", STRENGTH)
    assert_merged(folder, case, merged_weights(model_spec(folder / "model.safetensors"), lora))


@pytest.mark.parametrize("case", CASES)
def test_what_stock_skips_is_named(case: str, folder: Path) -> None:
    """It names keys that it does not know, and parameters for which it found a change of another size."""
    path = folder / f"{case}.safetensors"
    file = read_lora(read_model_file(str(path)), SHAPE)
    keys, parameters = set(), set()
    for said in json.loads((folder / "logs.json").read_text())[case]:
        if unknown := re.fullmatch("lora key not loaded: (.+)", said):
            keys.add(unknown[1])
        elif misfit := re.search(r"diffusion_model\.(\S+)", said):
            parameters.add(misfit[1])
    assert keys <= set(file.unknown)
    assert not parameters & file.patches.keys()
    modules = {f"diffusion_model.{re.sub(r'.(weight|bias)$', '', name)}." for name in parameters}
    assert all(key.startswith(tuple(modules)) for key in set(file.unknown) - keys)
    assert bool(file.unknown) == bool(keys | parameters)
    for module in modules:
        assert any(key.startswith(module) for key in file.unknown)


def test_what_stock_runs_with_and_we_refuse_is_listed(folder: Path) -> None:
    runs = json.loads((folder / "runs.json").read_text())
    assert 10 < len(runs) < len(REFUSED)
    listed = (REPO / "docs" / "differences.md").read_text()
    cases = [
        re.split(", ", each) for each in re.findall(r"test_file_is_refused` \[([^]]+)\]", listed)
    ]
    assert {case for each in cases for case in each} == set(runs)


@pytest.mark.parametrize("expert", [BOTH, LOW_NOISE])
def test_each_expert_takes_its_half_of_a_file(expert: str, folder: Path, tmp_path: Path) -> None:
    """Stock has two files for that: each half is one of them."""
    base = folder / "model.safetensors"
    (tmp_path / "low").mkdir()
    low = tmp_path / "low" / "model.safetensors"
    low.write_bytes(base.read_bytes())
    halves = {}
    for part, case in (("transformer", "plain"), ("transformer_2", "small alpha in fp8")):
        for key, value in load_file(folder / f"{case}.safetensors").items():
            halves[key.replace("diffusion_model", part)] = value
    save_file(halves, tmp_path / "both.safetensors")
    handle = ModelHandle(
        path=str(base),
        low_noise_path=str(low),
        dtype="float32",
        mesh="single",
        devices="cpu:1",
        compile=False,
    ).with_lora(str(tmp_path / "both.safetensors"), STRENGTH, expert)
    model = resolve_model(handle, visible_cuda=0)
    assert model.low_noise is not None
    assert_merged(folder, "small alpha in fp8", merged_weights(model.low_noise))
    if expert == BOTH:
        assert_merged(folder, "plain", merged_weights(model.spec))
    changed = "4" if expert == BOTH else "1"
    (line,) = model.lora_lines
    assert f": {changed} of {len(SHAPES)} parameters changed" in line
    assert "left out" not in line


if __name__ == "__main__":
    write_comfyui_results(Path(sys.argv[1]))
