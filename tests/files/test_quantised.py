"""Quantised files: what they are recognised as, the values of each rank's shard, what is held, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
import quantised_programs as programs
import rank_programs
import torch
from comfyui_child import REPO, run_beside_comfyui
from file_kit import refusal
from live_bytes import LiveBytes
from odd_scaled import LAYER, ODD, TINY, scaled
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.cli import model_shape
from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.jobs.handle import ModelHandle, resolve_model
from comfy_wan_dist.mesh.choice import choose_mesh
from comfy_wan_dist.mesh.dtypes import BLOCKS, FP8, PACKINGS
from comfy_wan_dist.mesh.layout import coordinates
from comfy_wan_dist.mesh.memory import UNPACKING_BYTES, rank_memory, unpacked_bytes, weight_bytes
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import TI2V_5B, LatentGrid, WanShape
from comfy_wan_dist.mesh.workload import Workload
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.wan import WanFile, read_wan_file
from devtools.checkpoints import transformer_weights
from devtools.ledgers import predict_ledger
from devtools.mesh_runs import (
    FORWARD_LIMIT,
    RUN_LIMIT,
    TEXT_TOKENS,
    Case,
    Schedule,
    mesh_degrees,
    model_spec,
    relative_error,
    sample_rank,
    single_groups,
)
from devtools.quantised import (
    ODD_WEIGHTS,
    RANDOM,
    WRITABLE,
    ScaledForm,
    write_fp8,
    write_gguf,
    write_modelopt,
    write_odd_scaled_fp8,
    write_scaled_fp8,
)
from devtools.rank_pool import RankPool
from workers.parallel.parallelize import cut_model
from workers.quant.blocks import unpack_blocks
from workers.quant.packed import PackedWeight

# Rows of 256 values, as K-quants need. A row cut of 512 or 768 columns over 4 ranks begins inside such a block.
SHAPE = WanShape(
    dim=512, ffn_dim=768, num_layers=2, in_dim=48, out_dim=48, text_dim=256, freq_dim=256
)
# Where only tp cuts, what is read depends on the form; elsewhere one of each kind is enough.
CASE = Case(name="any", frames=2, height=4, width=4)
SCHEDULE = Schedule(solver="euler", sigmas=(1.0, 0.5, 0.0), guidance=5.0)
ONE_STEP = Schedule(solver="euler", sigmas=(1.0, 0.0), guidance=5.0)


@dataclass(frozen=True, kw_only=True)
class Form:
    """A quantised file, and a plain float32 one with its values. packed: how many matrices stay quantised."""

    path: Path
    plain: Path
    packed: int

    @property
    def pair(self) -> tuple[ModelSpec, ModelSpec]:
        return model_spec(self.path), model_spec(self.plain)


@pytest.fixture(scope="session")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Form]:
    """Every form of one random model."""
    folder = tmp_path_factory.mktemp("forms")
    weights = transformer_weights(SHAPE, seed=8)
    matrices = sum(value.dim() == 2 for value in weights.values())
    forms: dict[str, Form] = {}

    def add(
        name: str, suffix: str, write: Callable[[Path], dict[str, Tensor]], packed: int
    ) -> None:
        path, plain = folder / f"{name}{suffix}", folder / f"{name}.plain.safetensors"
        save_file(write(path), plain)
        forms[name] = Form(path=path, plain=plain, packed=packed)

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        add(
            str(dtype).removeprefix("torch."),
            ".safetensors",
            partial(
                write_fp8,
                weights=weights,
                dtype=dtype,
                only_matrices=dtype is torch.float8_e5m2,
            ),
            matrices,
        )
    for form in ScaledForm:
        prefix = "model.diffusion_model." if form is ScaledForm.OLD else ""
        add(
            f"scaled-{form.name}",
            ".safetensors",
            partial(write_scaled_fp8, weights=weights, form=form, prefix=prefix),
            matrices,
        )
    for kind in (*WRITABLE, *RANDOM):
        add(
            kind,
            ".gguf",
            partial(write_gguf, weights=weights, types=(kind,)),
            matrices if kind in BLOCKS else 0,
        )
    mixed = ("Q4_K", "Q6_K", "Q5_K", "BF16", "Q8_0")
    add(
        "mixed",
        ".gguf",
        lambda path: write_gguf(path, weights, mixed, is_reshaped=False),
        matrices - len(range(3, matrices, 5)),
    )
    for kind in ("Q8_0", "Q4_0"):
        add(
            f"all-{kind}",
            ".gguf",
            partial(write_gguf, weights=weights, types=(kind,), only_matrices=False),
            matrices,
        )
    add(
        "modelopt",
        "-00001-of-00002.safetensors",
        partial(write_modelopt, weights=weights),
        matrices,
    )
    add("one-F16", ".safetensors", partial(write_one_f16, weights=weights), 0)
    add("odd", ".safetensors", partial(write_odd_scaled_fp8, weights=weights), matrices - 2)
    return forms


def write_one_f16(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    name = "blocks.0.ffn.0.weight"
    stored = {key: value.bfloat16() for key, value in weights.items()}
    stored[name] = weights[name].half()
    save_file(stored, path)
    return {key: value.float() for key, value in stored.items()}


def recognise(path: Path) -> WanFile:
    return read_wan_file(read_model_file(str(path)))


# ---- values


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_unpack_to_the_values_of_the_package(kind: str) -> None:
    of = gguf.GGMLQuantizationType[kind]
    assert BLOCKS[kind] == gguf.GGML_QUANT_SIZES[of]
    generator = np.random.default_rng(0)
    # Any bits at all, infinite scales and NaN among them.
    blocks = generator.integers(0, 256, (64, 7 * BLOCKS[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, of)
    actual = unpack_blocks(torch.from_numpy(blocks), kind).numpy()
    assert np.array_equal(actual, expected, equal_nan=True)
    assert np.isfinite(expected).mean() > 0.5


@pytest.mark.parametrize("mesh", ["single", "tp2", "tp4", "pp2", "ulysses2"])
def test_every_form_loads_to_the_slices_of_its_values(
    mesh: str, forms: Mapping[str, Form], rank_pool: RankPool
) -> None:
    degrees = mesh_degrees(mesh)
    answers = rank_pool.run(
        degrees.world_size,
        programs.compare_shards,
        mesh,
        [form.pair for form in forms.values()],
    )
    for index, (name, form) in enumerate(forms.items()):
        file = recognise(form.path)
        for rank, shard in enumerate(shards[index] for shards in answers):
            assert shard.different == (), name
            stage = coordinates(degrees, rank)["pp"]
            planned = weight_bytes(file.shape, degrees, stage=stage, dtype="float32")
            assert shard.held <= planned, name
            assert degrees.pp > 1 or shard.packed == form.packed, name
        if degrees.pp == 1:
            # Each byte once, whatever shares of a block the ranks hold; scales by each tp rank.
            read = sum(shards[index].read for shards in answers)
            tensors = file.entries.values()
            weights = sum(tensor.entry.size for tensor in tensors)
            scales = sum(tensor.scale.size for tensor in tensors if tensor.scale is not None)
            # What is unpacked on its way by each tp rank, too.
            scales += sum(
                tensor.entry.size
                for tensor in tensors
                if tensor.entry.dtype in BLOCKS and not tensor.is_packed
            )
            assert weights <= read <= weights + scales * degrees.tp, name
        if degrees.world_size == 1:
            packed = sum(tensor.entry.size for tensor in tensors if tensor.is_packed)
            plain = sum(4 * np.prod(each.shape) for each in tensors if not each.is_packed)
            assert answers[0][index].held == packed + plain, name
            assert packed > 0.05 * weights or not form.packed, name


@pytest.fixture(scope="module")
def alone(forms: Mapping[str, Form]) -> dict[str, programs.Sampled]:
    """What one process makes of some forms."""
    inputs = CASE.inputs(SHAPE)
    return {
        form: programs.sample_pair(0, "single", forms[form].pair, inputs, SCHEDULE)
        for form in ("scaled-OLD", "mixed", "odd", "all-Q8_0")
    }


@pytest.mark.parametrize(
    ("form", "mesh"),
    [
        ("scaled-OLD", "tp2"),
        ("mixed", "tp4"),
        ("mixed", "pp2"),
        ("scaled-OLD", "tp2-sp"),
        ("scaled-OLD", "ulysses2-fsdp"),
        ("mixed", "ulysses2-fsdp"),
        ("odd", "cfg2-tp2-fsdp"),
        ("all-Q8_0", "ulysses2-fsdp"),
    ],
)
def test_sampling_is_that_of_one_process_and_of_the_plain_values(
    mesh: str,
    form: str,
    forms: Mapping[str, Form],
    alone: Mapping[str, programs.Sampled],
    rank_pool: RankPool,
) -> None:
    size = mesh_degrees(mesh).world_size
    ranks = rank_pool.run(
        size, programs.sample_pair, mesh, forms[form].pair, CASE.inputs(SHAPE), SCHEDULE
    )
    for run in (alone[form], *ranks):
        assert torch.equal(run.quantised, run.plain)
        assert relative_error(run.quantised, alone[form].plain) <= FORWARD_LIMIT
    assert relative_error(ranks[0].latent, alone[form].latent) <= RUN_LIMIT


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ("Q4_K", programs.first_columns_on_every_rank),
        ("scaled-NEW", programs.no_scale),
    ],
)
def test_comparison_notices(
    form: str, fault: Callable[[], object], forms: Mapping[str, Form], rank_pool: RankPool
) -> None:
    shards = rank_pool.run(
        4,
        rank_programs.with_fault,
        fault,
        programs.compare_shards,
        "tp4",
        [forms[form].pair],
    )
    assert any(shard[0].different for shard in shards)


@pytest.mark.parametrize("form", ["scaled-OLD", "Q6_K"])
def test_compiled_blocks_give_the_same(
    form: str, forms: Mapping[str, Form], rank_pool: RankPool
) -> None:
    inputs, spec = CASE.inputs(SHAPE), forms[form].pair[0]
    eager, compiled = (
        rank_pool.run(2, programs.velocities, "tp2", [spec], inputs, backend)[0][0]
        for backend in (None, "aot_eager")
    )
    assert relative_error(compiled, eager) <= FORWARD_LIMIT


# ---- memory


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("tp2", ("float8_e5m2", "Q4_K", "mixed")),
        ("tp4", ("float8_e5m2", "Q4_K")),
        ("pp2", ("mixed",)),
        ("ulysses2-fsdp", ("float8_e5m2", "Q4_K", "mixed")),
    ],
)
def test_planned_bytes_are_what_a_rank_holds_after_a_job(
    mesh: str, names: tuple[str, ...], forms: Mapping[str, Form], rank_pool: RankPool
) -> None:
    degrees = mesh_degrees(mesh)
    ranks = rank_pool.run(
        degrees.world_size,
        rank_programs.held_weight_bytes,
        mesh,
        [model_spec(forms[name].path) for name in names],
        CASE.inputs(SHAPE),
        ONE_STEP,
    )
    for name, held in zip(names, zip(*ranks, strict=True), strict=True):
        shape = recognise(forms[name].path).shape
        for stage in range(degrees.pp):
            of_stage = [
                size for rank, size in enumerate(held) if coordinates(degrees, rank)["pp"] == stage
            ]
            assert max(of_stage) == weight_bytes(shape, degrees, stage=stage, dtype="float32")
        if (mesh, name) == ("tp4", "Q4_K"):  # 192 of 768 columns: one block of 256, or parts of two
            assert len(set(held)) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_gathers_of_packed_blocks_are_the_counted_ones(
    dtype: str, forms: Mapping[str, Form], rank_pool: RankPool
) -> None:
    path, degrees = forms["mixed"].path, mesh_degrees("ulysses2-fsdp")
    spec = model_spec(path, dtype=dtype)
    ranks = rank_pool.run(2, sample_rank, "ulysses2-fsdp", spec, CASE.inputs(SHAPE), SCHEDULE)
    job = Workload(
        shape=recognise(path).shape,
        grid=LatentGrid(frames=2, rows=2, columns=2),
        steps=2,
        guided=True,
        dtype=dtype,
        text_tokens=(TEXT_TOKENS, TEXT_TOKENS),
    )
    for rank, (_, ledger, _) in enumerate(ranks):
        assert predict_ledger(job, degrees, rank) == ledger


@pytest.mark.parametrize("kind", [*BLOCKS, *FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacking_takes_no_more_than_planned(kind: str, dtype: torch.dtype) -> None:
    packing = replace(PACKINGS[kind], is_scaled=kind in FP8)
    weight = PackedWeight(packing, torch.empty(64, 1024, dtype=dtype), first=0)
    with LiveBytes() as live, torch.inference_mode():
        values = weight()
    assert values.shape == (64, 1024)
    # Of scales and indices there is a little more, which a larger matrix would show as well.
    assert values.nbytes <= live.peak <= UNPACKING_BYTES * values.numel()
    assert unpacked_bytes(SHAPE, mesh_degrees("single")) == 0
    largest = max(768 * 512, 6 * 512**2)
    packed = replace(SHAPE, packed=(("time_projection.1.weight", packing),))
    assert unpacked_bytes(packed, mesh_degrees("tp2")) == UNPACKING_BYTES * largest


def test_a_plan_for_a_file_counts_its_bytes(forms: Mapping[str, Form]) -> None:
    weights = {}
    for form in ("F32", "Q4_K"):
        shape = model_shape(str(forms[form].path))
        job = Workload(
            shape=shape, grid=LatentGrid(frames=2, rows=2, columns=2), steps=1, guided=True
        )
        weights[form] = rank_memory(job, mesh_degrees("single"), 0).weights
    assert weights["Q4_K"] < 0.4 * weights["F32"]


def test_a_quantised_file_makes_auto_choose_a_mesh_that_its_size_allows() -> None:
    packed = tuple(
        (name, PACKINGS["Q4_K"])
        for name, shape in expected_parameters(TI2V_5B).items()
        if len(shape) == 2
    )
    small = replace(TI2V_5B, packed=packed)
    whole, quantised = (
        weight_bytes(shape, mesh_degrees("single"), stage=0, dtype="bfloat16")
        for shape in (TI2V_5B, small)
    )
    assert quantised == pytest.approx(144 / 256 * 5.0e9, rel=0.01)
    memory = 11 * 10**9
    assert whole < memory
    plain, chosen = (
        choose_mesh(shape, device_count=2, guided=True, device_memory=memory)
        for shape in (TI2V_5B, small)
    )
    assert plain.tp == 2 or plain.fsdp
    assert str(chosen) == "cfg2"


@pytest.mark.parametrize(
    ("form", "kind", "dtype"),
    [
        ("float8_e4m3fn", "cpu", "float32"),  # its biases are fp8 as well
        ("float8_e5m2", "cpu", "bfloat16"),
        ("scaled-NEW", "cpu", "bfloat16"),
        ("Q4_K", "cpu", "float32"),
        ("F16", "cpu", "float16"),
        ("one-F16", "cpu", "bfloat16"),
        ("Q4_K", "0", "bfloat16"),
    ],
)
def test_dtype_auto(form: str, kind: str, dtype: str, forms: Mapping[str, Form]) -> None:
    handle = ModelHandle(
        path=str(forms[form].path), dtype="auto", mesh="single", devices=kind, compile=False
    )
    assert resolve_model(handle, visible_cuda=1).spec.dtype == dtype


# ---- refusals


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -0.5])
def test_scale_that_no_weight_can_have_is_refused_and_the_group_lives(
    value: float, tmp_path: Path, rank_pool: RankPool
) -> None:
    scale = f"{LAYER}.scale_weight"
    path = scaled(
        tmp_path / "m.safetensors",
        lambda tensors: tensors.update({scale: torch.full_like(tensors[scale], value)}),
        ScaledForm.OLD,
    )
    errors = rank_pool.run(
        2,
        rank_programs.sample_error,
        "cfg2",
        model_spec(path),
        CASE.inputs(TINY),
        SCHEDULE,
    )
    message = (
        f"ModelFileError: the scale of {LAYER}.weight is {value}, which must be finite and not "
        "negative; the file is damaged: download it again"
    )
    assert errors == [message, message]


@pytest.mark.parametrize("case", ODD)
def test_odd_scaled_file_is_refused(case: str, tmp_path: Path) -> None:
    form, change, words = ODD[case]
    path = scaled(tmp_path / "m.safetensors", change, form)
    assert words in refusal(lambda: recognise(path))


@pytest.mark.parametrize(
    "metadata",
    ["no JSON", "[]", '{"layers": 3}', '{"layers": {"blocks.0.ffn.0": {}}}', "[" * 100_000],
)
def test_quantisation_metadata_that_cannot_be_read_is_refused(
    metadata: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    save_file(
        transformer_weights(TINY, seed=1), path, metadata={"_quantization_metadata": metadata}
    )
    message = refusal(lambda: recognise(path))
    assert message.startswith("the _quantization_metadata of m.safetensors cannot be read;")


# ---- ComfyUI


STOCK_SHAPE = replace(SHAPE, dim=256, ffn_dim=256, num_layers=1, text_dim=4096)
MARKERS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
)
OTHER_SINCE_0_8 = ("scaled-types", *(f"scaled-odd-{marker}" for marker in MARKERS))
REST = ("blocks.0.modulation", "blocks.0.self_attn.norm_q.weight", "head.modulation")
SCALE_TYPES = (
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int8,
)
STOCK_FORMS = (
    "plain-e4m3fn",
    "plain-e5m2",
    "scaled-OLD",
    "scaled-METADATA",
    *(f"scaled-odd-{marker}" for marker in MARKERS),
    "scaled-types",
    "plain-types",
    "two-models",
)


def write_stock_forms(folder: Path) -> None:
    # ComfyUI rounds the biases of an older scaled file to either fp8, so they are given values of both here.
    both = (torch.float8_e4m3fn, torch.float8_e5m2)
    weights = {
        name: value.to(both[0]).to(both[1]).float() if name.endswith("bias") else value
        for name, value in transformer_weights(STOCK_SHAPE, seed=8).items()
    }
    for dtype in both:
        name = str(dtype).removeprefix("torch.float8_")
        write_fp8(folder / f"plain-{name}.safetensors", weights, dtype, only_matrices=False)
    for form in (ScaledForm.OLD, ScaledForm.METADATA):
        write_scaled_fp8(folder / f"scaled-{form.name}.safetensors", weights, form)
    for marker in MARKERS:
        write_odd_scaled_fp8(folder / f"scaled-odd-{marker}.safetensors", weights, marker=marker)
    write_fp8(folder / "plain-rest.safetensors", weights, both[0], only_matrices=True)
    write_scaled_fp8(folder / "scaled-alone.safetensors", weights, ScaledForm.OLD)
    alone = load_file(folder / "scaled-alone.safetensors")
    del alone["scaled_fp8"]
    save_file(alone, folder / "scaled-alone.safetensors")
    write_scaled_fp8(folder / "scaled-types.safetensors", weights, ScaledForm.OLD)
    stored = load_file(folder / "scaled-types.safetensors")
    scales = [name for name in stored if name.endswith("scale_weight")]
    for name, dtype in zip(scales, SCALE_TYPES, strict=False):
        stored[name] = stored[name].mul(2**8).ceil().to(dtype)
    stored["head.head.weight"] = weights["head.head.weight"].double()
    save_file(stored, folder / "scaled-types.safetensors")
    types = (torch.float64, torch.bfloat16, torch.float16, torch.float32, torch.float32)
    mixed = {
        name: value.to(types[index % len(types)])
        for index, (name, value) in enumerate(weights.items())
    }
    save_file(mixed, folder / "plain-types.safetensors")
    others = transformer_weights(STOCK_SHAPE, seed=9)
    both_models = {f"diffusion_model.{name}": value for name, value in others.items()}
    both_models |= {f"model.{name}": value for name, value in weights.items()}
    save_file(both_models, folder / "two-models.safetensors")
    (folder / "odd").mkdir()
    for name, (form, change, _) in ODD.items():
        scaled(folder / "odd" / f"{name}.safetensors", change, form)


def write_comfyui_results(folder: Path) -> None:
    """Weights and guided velocity as ComfyUI has them, of each file in `folder`; run in a process of its own.

    Of the files that we refuse, the names of those that it runs with.
    """
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.ops
    import comfy.sd
    import comfy.utils

    torch.set_num_threads(1)
    inputs = CASE.inputs(STOCK_SHAPE)
    assert inputs.uncond is not None
    results = {}
    # ComfyUI 0.3.64 reads no metadata.
    forms = list(STOCK_FORMS if hasattr(comfy.ops, "mixed_precision_ops") else STOCK_FORMS[:3])
    if hasattr(comfy.utils, "convert_old_quants"):  # which takes all older scaled files for e4m3fn
        forms = [name for name in forms if name not in OTHER_SINCE_0_8]
    for name in forms:
        loaded = comfy.sd.load_diffusion_model(str(folder / f"{name}.safetensors"))
        model = loaded.model.diffusion_model
        for path, module in model.named_modules():
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2:
                convert = getattr(module, "convert_weight", lambda weight: weight)
                weight = module.weight.data
                # A ComfyUI that has no tensors of its own for this gives plain ones to it in another type.
                given = weight.float() if type(weight) is Tensor else weight
                results[f"{name}/{path}.weight"] = convert(given).float().contiguous()
        time = torch.tensor([700.0])
        with torch.no_grad():
            cond, uncond = (
                model(inputs.noisy, time, context).float()
                for context in (inputs.cond, inputs.uncond)
            )
        results[f"{name}/velocity"] = uncond + 5.0 * (cond - uncond)
    # As on a device that computes in fp8.
    with mock.patch("comfy.model_management.supports_fp8_compute", return_value=True):
        loaded = comfy.sd.load_diffusion_model(str(folder / "plain-rest.safetensors"))
    for name in REST:
        results[f"plain-rest/{name}"] = loaded.model.diffusion_model.get_parameter(name).float()
    loaded = comfy.sd.load_diffusion_model(str(folder / "scaled-alone.safetensors"))
    layer = loaded.model.diffusion_model.get_submodule(LAYER)
    assert not hasattr(layer, "scale_weight")
    results[f"scaled-alone/{LAYER}.weight"] = layer.weight.float()
    save_file(results, folder / "results.safetensors")
    runs = []
    for path in (folder / "odd").iterdir():
        with contextlib.suppress(Exception), torch.no_grad():
            loaded = comfy.sd.load_diffusion_model(str(path))
            loaded.model.diffusion_model(inputs.noisy, time, inputs.cond)
            runs.append(path.stem)
    (folder / "runs.json").write_text(json.dumps(runs))


def test_weight_without_scale_is_named(forms: Mapping[str, Form]) -> None:
    for name, form in forms.items():
        handle = ModelHandle(
            path=str(form.path), dtype="auto", mesh="single", devices="cpu:1", compile=False
        )
        notes = resolve_model(handle, visible_cuda=0).notes
        said = (f"{form.path.name} has no scale for '{ODD_WEIGHTS[0]}'; 1 is taken",)
        assert notes == (said if name == "odd" else ())


def test_fp8_matches_comfyui(comfyui_path: Path, tmp_path: Path, rank_pool: RankPool) -> None:
    write_stock_forms(tmp_path)
    run_beside_comfyui(__file__, tmp_path, comfyui_path)
    results = load_file(tmp_path / "results.safetensors")
    forms = [name for name in STOCK_FORMS if f"{name}/velocity" in results]
    assert forms[:3] == list(STOCK_FORMS[:3])
    specs = [model_spec(tmp_path / f"{name}.safetensors") for name in forms]
    (ours,) = rank_pool.run(1, programs.velocities, "single", specs, CASE.inputs(STOCK_SHAPE))
    (weights,) = rank_pool.run(1, programs.matrices, "single", specs)
    for name, velocity, matrices in zip(forms, ours, weights, strict=True):
        assert relative_error(velocity, results[f"{name}/velocity"]) < 1e-4
        assert len(matrices) > 10
        for path, matrix in matrices.items():
            assert torch.equal(matrix, results[f"{name}/{path}"]), (name, path)
    rest = recognise(tmp_path / "plain-rest.safetensors")
    for name, value in load_file(tmp_path / "plain-rest.safetensors").items():
        if name in REST:
            assert rest.entries[name].entry.dtype == "BF16"
            assert rest.entries[name].rounded_to is None
            assert torch.equal(results[f"plain-rest/{name}"], value.to(torch.float8_e4m3fn).float())
    alone = tmp_path / "scaled-alone.safetensors"
    assert recognise(alone).entries[f"{LAYER}.weight"].scale is not None
    raw = load_file(alone)[f"{LAYER}.weight"].float()
    assert torch.equal(results[f"scaled-alone/{LAYER}.weight"], raw)
    runs = set(json.loads((tmp_path / "runs.json").read_text()))
    assert runs < ODD.keys()
    differences = (REPO / "docs" / "differences.md").read_text()
    listed = re.findall(r"test_odd_scaled_file_is_refused` \[([^]]+)\]", differences)
    # Versions of ComfyUI differ in which of them they run.
    assert runs <= {case for cases in listed for case in cases.split(", ")}
    assert len(runs) > 5


if __name__ == "__main__":
    write_comfyui_results(Path(sys.argv[1]))


def test_every_load_has_the_same_types_so_that_compiled_code_serves_all(
    forms: dict[str, Form],
) -> None:
    shape = recognise(forms["Q8_0"].path).shape
    first, second = (
        cut_model(shape, single_groups(), dtype=torch.float32, device=torch.device("meta"))
        for _ in range(2)
    )
    types = [[type(module) for module in model.modules()] for model in (first, second)]
    assert types[0] == types[1]
    assert any(kind.__name__ == "PackedLinear" for kind in types[0])
