"""Quantised files: what they are recognised as, the values of each rank's shard, what is held, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import quantised_programs as programs
import rank_programs
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.layout import coordinates
from comfy_wan_dist.mesh.memory import weight_bytes
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.encoding import BLOCKS
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.wan import WanFile, read_wan_file
from devtools.checkpoints import transformer_weights
from devtools.mesh_runs import (
    FORWARD_LIMIT,
    Case,
    Schedule,
    mesh_degrees,
    model_spec,
    relative_error,
)
from devtools.quantised import (
    RANDOM,
    WRITABLE,
    ScaledForm,
    write_fp8,
    write_gguf,
    write_scaled_fp8,
)
from devtools.rank_pool import RankPool
from workers.model.unpack import unpack_blocks
from workers.parallel.plan import Cut, cut_of

# Rows of 256 values, as K-quants need. A row cut of 512 or 768 columns over 4 ranks begins inside such a block.
SHAPE = WanShape(
    dim=512, ffn_dim=768, num_layers=2, in_dim=48, out_dim=48, text_dim=256, freq_dim=256
)
MESHES = ("single", "tp2", "tp4", "pp2", "ulysses2", "tp2-sp")
CASE = Case(name="any", frames=2, height=4, width=4)
SCHEDULE = Schedule(solver="euler", sigmas=(1.0, 0.5, 0.0), guidance=5.0)


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
            lambda path, dtype=dtype: write_fp8(
                path, weights, dtype, only_matrices=dtype is torch.float8_e5m2
            ),
            matrices,
        )
    for form in ScaledForm:
        prefix = "model.diffusion_model." if form is ScaledForm.OLD else ""
        add(
            f"scaled-{form.name}",
            ".safetensors",
            lambda path, form=form, prefix=prefix: write_scaled_fp8(
                path, weights, form, prefix=prefix
            ),
            matrices,
        )
    for kind in (*WRITABLE, *RANDOM):
        add(
            kind,
            ".gguf",
            lambda path, kind=kind: write_gguf(path, weights, (kind,)),
            matrices if kind in BLOCKS else 0,
        )
    mixed = ("Q4_K", "Q6_K", "Q5_K", "BF16", "Q8_0")
    add(
        "mixed",
        ".gguf",
        lambda path: write_gguf(path, weights, mixed, is_reshaped=False),
        matrices - len(range(3, matrices, 5)),
    )
    return forms


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


@pytest.mark.parametrize("mesh", MESHES)
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
    for rank, shards in enumerate(answers):
        for (name, form), shard in zip(forms.items(), shards, strict=True):
            assert shard.different == (), name
            if degrees.pp == 1:
                assert shard.packed == form.packed, name
                assert shard.read == bytes_to_read(recognise(form.path), tp=degrees.tp), name
            stage = coordinates(degrees, rank)["pp"]
            shape = recognise(form.path).shape
            assert shard.held <= weight_bytes(shape, degrees, stage=stage, dtype="float32"), name


def bytes_to_read(file: WanFile, *, tp: int) -> int:
    """By one rank: its rows of what is cut by rows; a cut by columns passes over whole rows."""
    total = 0
    for name, tensor in file.entries.items():
        size = tensor.entry.stop - tensor.entry.start
        cut = cut_of(name.rpartition(".")[0])
        total += size // (tp if cut in (Cut.COLUMN, Cut.SHARDED_NORM) else 1)
        total += 0 if tensor.scale is None else 4
    return total


@pytest.mark.parametrize("form", ["scaled-OLD", "mixed"])
@pytest.mark.parametrize("mesh", ["tp2", "tp4", "pp2", "ulysses2", "tp2-sp", "ulysses2-fsdp"])
def test_sampling_is_that_of_one_process_and_of_the_plain_values(
    mesh: str, form: str, forms: Mapping[str, Form], rank_pool: RankPool
) -> None:
    inputs = CASE.inputs(SHAPE)
    pair = forms[form].pair
    (alone,) = rank_pool.run(1, programs.velocities, "single", pair, inputs)
    assert torch.equal(*alone)
    size = mesh_degrees(mesh).world_size
    for quantised, plain in rank_pool.run(size, programs.velocities, mesh, pair, inputs):
        assert torch.equal(quantised, plain)
        assert relative_error(quantised, alone[0]) <= FORWARD_LIMIT


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


@pytest.mark.parametrize("form", ["float8_e5m2", "Q4_K", "mixed"])
@pytest.mark.parametrize("mesh", ["single", "tp2", "tp4", "pp2", "ulysses2-fsdp"])
def test_planned_bytes_are_what_a_rank_holds_after_a_job(
    mesh: str, form: str, forms: Mapping[str, Form], rank_pool: RankPool
) -> None:
    degrees = mesh_degrees(mesh)
    path = forms[form].path
    held = rank_pool.run(
        degrees.world_size,
        rank_programs.held_weight_bytes,
        mesh,
        model_spec(path),
        CASE.inputs(SHAPE),
        SCHEDULE,
    )
    shape = recognise(path).shape
    for stage in range(degrees.pp):
        of_stage = [
            size for rank, size in enumerate(held) if coordinates(degrees, rank)["pp"] == stage
        ]
        assert max(of_stage) == weight_bytes(shape, degrees, stage=stage, dtype="float32")
    if (mesh, form) == ("tp4", "Q4_K"):  # 192 of 768 columns: one block of 256, or parts of two
        assert len(set(held)) == 2


def test_matrices_take_the_bytes_of_the_file(
    forms: Mapping[str, Form], rank_pool: RankPool
) -> None:
    (shards,) = rank_pool.run(
        1, programs.compare_shards, "single", [form.pair for form in forms.values()]
    )
    for (name, form), shard in zip(forms.items(), shards, strict=True):
        file = recognise(form.path)
        plain = sum(
            4 * np.prod(tensor.shape) for tensor in file.entries.values() if not tensor.is_packed
        )
        packed = sum(
            tensor.entry.stop - tensor.entry.start
            for tensor in file.entries.values()
            if tensor.is_packed
        )
        assert shard.held == plain + packed, name
        if form.packed:
            assert packed > 0.05 * file.file.file_bytes
