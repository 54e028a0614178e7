"""LoRAs merged into quantised weights: what they are then, on every mesh, and what a change of the chain costs.

Covered on the CPU: fp8, scaled fp8 and GGUF; the packing against the gguf package. Not covered: files of 16 and 32 bits
(test_lora.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import gguf
import lora_programs
import pytest
import rank_programs
import torch
from lora_programs import RunOnRank
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.ipc.messages import LoraSpec, ModelSpec
from comfy_wan_dist.mesh.memory import weight_bytes
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.lora import changed_shape, read_lora
from comfy_wan_dist.model_file.wan import read_wan_file
from devtools.checkpoints import transformer_weights
from devtools.loras import Parts, PartsMaker, merged, mixed_lora, spelled
from devtools.mesh_runs import (
    Case,
    Inputs,
    Schedule,
    build_local_runner,
    lora_spec,
    mesh_degrees,
    model_spec,
    relative_error,
)
from devtools.quantised import ScaledForm, write_fp8, write_gguf, write_scaled_fp8
from devtools.rank_pool import RankPool
from workers.quant.blocks import pack_q8_0, unpack_blocks
from workers.quant.packed import packed_weights

# Of tp4's ranks some begin inside a block of 32; embeddings have no rows of whole blocks.
FP8_SHAPE = WanShape(
    dim=512, ffn_dim=736, num_layers=3, in_dim=48, out_dim=48, text_dim=16, freq_dim=8
)
GGUF_SHAPE = replace(FP8_SHAPE, ffn_dim=768, text_dim=256, freq_dim=256)
ONE_STEP = Schedule(solver="euler", sigmas=(0.7, 0.0), guidance=5.0)
STRENGTH = 0.7
LIMIT = 1e-4
"""Of results on meshes: a value that lies between two steps may be rounded to either."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A quantised model, its values in float32, and a LoRA for it."""

    shape: WanShape
    spec: ModelSpec
    values: Mapping[str, Tensor]
    parts: Parts
    lora: LoraSpec

    @property
    def changed(self) -> ModelSpec:
        return replace(self.spec, loras=(self.lora,))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Form]:
    folder = tmp_path_factory.mktemp("lora-quantised")
    forms = {}
    for name, shape in {
        "fp8": FP8_SHAPE,
        "scaled": FP8_SHAPE,
        "Q4_K": GGUF_SHAPE,
        "Q8_0": GGUF_SHAPE,
    }.items():
        weights = transformer_weights(shape, seed=4)
        path = folder / (f"{name}.safetensors" if shape is FP8_SHAPE else f"{name}.gguf")
        if name == "fp8":
            values = write_fp8(path, weights, torch.float8_e4m3fn, only_matrices=True)
        elif name == "scaled":
            values = write_scaled_fp8(path, weights, ScaledForm.NEW)
        else:
            values = write_gguf(path, weights, (name,))
        make = PartsMaker(expected_parameters(shape), seed=6)
        parts = {
            **mixed_lora(expected_parameters(shape), seed=5),
            "text_embedding.0.weight": make.low_rank("text_embedding.0.weight"),
        }
        save_file(spelled(parts, "comfyui"), folder / f"lora-{name}.safetensors")
        forms[name] = Form(
            shape=shape,
            spec=model_spec(path),
            values=values,
            parts=parts,
            lora=lora_spec(folder / f"lora-{name}.safetensors", STRENGTH),
        )
    return forms


def inputs_of(form: Form) -> Inputs:
    return Case(name="any", frames=2, height=4, width=6).inputs(form.shape)


def run(
    pool: RankPool, form: Form, mesh: str, *specs: ModelSpec, fresh: bool = False
) -> list[list[RunOnRank]]:
    size = mesh_degrees(mesh).world_size
    return pool.run(size, lora_programs.run_specs, mesh, specs, inputs_of(form), ONE_STEP, fresh)


@pytest.mark.parametrize("spread", [1.0, 1e-9, 1e4])
def test_packing_is_that_of_the_gguf_package(spread: float) -> None:
    values = torch.randn(7, 96, generator=torch.Generator().manual_seed(1)) * spread
    values[3] = 0
    values[4, :32] = torch.arange(32) * 127 / 62 * spread  # halves
    expected = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
    packed = pack_q8_0(values)
    assert torch.equal(packed, torch.from_numpy(expected))
    error = (unpack_blocks(packed, "Q8_0") - values).abs().unflatten(1, (-1, 32))
    assert bool((error <= allowed_error(values).unflatten(1, (-1, 32))).all())


def allowed_error(values: Tensor) -> Tensor:
    """Half a step, the rounding of the scale to float16, and where that has no more digits."""
    most = values.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    return most * (0.5 / 127 + 2**-11) + 127 * 2**-25


@pytest.mark.parametrize("name", ["fp8", "scaled", "Q4_K", "Q8_0"])
def test_merged_weights_are_within_half_a_step(name: str, forms: dict[str, Form]) -> None:
    """What a LoRA leaves alone stays as it was, what no blocks suit is in the model's dtype."""
    form = forms[name]
    runner, agreement = build_local_runner(0, "single")
    lora_programs.run_on(runner, agreement, "single", form.changed, inputs_of(form), ONE_STEP)
    assert runner._transformers.model.held is not None
    model = runner._transformers.model.held.loaded.model
    expected = merged(form.values, (form.parts, STRENGTH))
    touched = {key for key in expected if not torch.equal(expected[key], form.values[key])}
    packed = packed_weights(model)
    again = {key for key in packed if key in touched}
    assert len(again) > 12
    assert {packed[key].encoding for key in again} == {"Q8_0"}
    for key, weight in packed.items():
        if key in touched:
            error = (weight() - expected[key]).abs()
            assert bool((error <= allowed_error(expected[key]) + 1e-6).all()), key
        else:
            assert torch.equal(weight(), form.values[key]), key
    for key, parameter in model.named_parameters():
        if not key.endswith("packed.data"):
            torch.testing.assert_close(parameter, expected[key], rtol=1e-5, atol=1e-6)
    assert ("text_embedding.0.weight" in packed) == (form.shape is GGUF_SHAPE)


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        ("scaled", ("tp4", "ulysses2-fsdp")),
        ("Q4_K", ("tp2", "ulysses2-fsdp")),
        ("fp8", ("pp2",)),
    ],
)
def test_mesh_matches_one_process(
    name: str, meshes: tuple[str, ...], forms: dict[str, Form], rank_pool: RankPool
) -> None:
    form = forms[name]
    ((alone, bare),) = run(rank_pool, form, "single", form.changed, form.spec)
    assert relative_error(bare.result, alone.result) > 100 * LIMIT
    for mesh in meshes:
        (there, *_), *_ = run(rank_pool, form, mesh, form.changed)
        assert relative_error(there.result, alone.result) <= LIMIT, mesh


@pytest.mark.parametrize(("name", "mesh"), [("scaled", "tp2"), ("Q4_K", "ulysses2-fsdp")])
def test_every_change_of_the_chain_is_a_fresh_load(
    name: str, mesh: str, forms: dict[str, Form], rank_pool: RankPool
) -> None:
    """The first LoRA makes other memory of the weights, and so loads the model anew; a change of its strength not."""
    form = forms[name]
    weak = replace(form.spec, loras=(replace(form.lora, strength=0.2),))
    specs = (form.spec, form.changed, weak, form.spec)
    kept = run(rank_pool, form, mesh, *specs)
    for ours, fresh in zip(kept, run(rank_pool, form, mesh, *specs, fresh=True), strict=True):
        for one, other in zip(ours, fresh, strict=True):
            assert one.error == other.error == ""
            assert one.digests == other.digests != {}
        assert ours[2].bytes_read < 0.9 * ours[1].bytes_read


@pytest.mark.parametrize(
    ("name", "mesh"), [("scaled", "tp4"), ("Q4_K", "tp4"), ("Q4_K", "ulysses2-fsdp")]
)
def test_planned_bytes_are_what_a_rank_holds(
    name: str, mesh: str, forms: dict[str, Form], rank_pool: RankPool
) -> None:
    form, degrees = forms[name], mesh_degrees(mesh)
    held = rank_pool.run(
        degrees.world_size,
        rank_programs.held_weight_bytes,
        mesh,
        [form.changed],
        inputs_of(form),
        ONE_STEP,
    )
    file = read_wan_file(read_model_file(form.spec.path))
    shape = changed_shape(
        file.shape, read_lora(read_model_file(form.lora.path), form.shape).patches
    )
    assert shape != file.shape
    assert max(size for (size,) in held) == weight_bytes(shape, degrees, stage=0, dtype="float32")
