"""LoRAs merged into the ranks' shards: against merging by other code, and against fresh loads.

Covered on the CPU over gloo in float32 and bfloat16: every kind of change on cut and whole parameters, every spelling
of the keys, chains, changes of a chain without reading what it does not touch, and bad values found while merging.
Not covered here: what a file is refused for before it is read (test_lora_file.py), and ComfyUI (test_lora_node.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lora_programs
import pytest
import torch
from lora_programs import RunOnRank
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.ipc.messages import LoraSpec, ModelSpec
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import transformer_weights
from devtools.loras import SPELLINGS, Parts, PartsMaker, merged, mixed_lora, plain_lora, spelled
from devtools.mesh_runs import (
    FORWARD_LIMIT,
    Case,
    Schedule,
    lora_spec,
    mesh_degrees,
    model_spec,
    relative_error,
)
from devtools.rank_pool import RankPool
from workers.checkpoint import lora as lora_module

SHAPE = WanShape(dim=512, ffn_dim=256, num_layers=3, in_dim=48, out_dim=48, text_dim=16, freq_dim=8)
SHAPES = expected_parameters(SHAPE)
INPUTS = Case(name="any", frames=2, height=4, width=6).inputs(SHAPE)
ONE_STEP = Schedule(solver="euler", sigmas=(0.7, 0.0), guidance=5.0)
MESHES = (
    "single",
    "tp2",
    "tp4",
    "pp2",
    "ring2",
    "ulysses2-fsdp",
    "cfg2-tp2-fsdp",
)
MIXED, PLAIN = mixed_lora(SHAPES, seed=5), plain_lora(SHAPES, seed=6)

Run = Callable[..., list[list[RunOnRank]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.safetensors, mixed.safetensors, plain.safetensors."""
    folder = tmp_path_factory.mktemp("lora")
    save_file(transformer_weights(SHAPE, seed=4), folder / "model.safetensors")
    save_file(spelled(MIXED, "comfyui"), folder / "mixed.safetensors")
    save_file(spelled(PLAIN, "comfyui"), folder / "plain.safetensors")
    return folder


@pytest.fixture(scope="module")
def base(folder: Path) -> ModelSpec:
    return model_spec(folder / "model.safetensors")


@pytest.fixture(scope="module")
def lora(folder: Path) -> Callable[[str, float], LoraSpec]:
    return lambda name, strength: lora_spec(folder / f"{name}.safetensors", strength)


@pytest.fixture(scope="module")
def run(rank_pool: RankPool) -> Run:
    """Jobs on all ranks of a mesh, each with the model as its spec says: for each rank a list."""

    def on_mesh(mesh: str, *specs: ModelSpec, fresh: bool = False) -> list[list[RunOnRank]]:
        size = mesh_degrees(mesh).world_size
        return rank_pool.run(size, lora_programs.run_specs, mesh, specs, INPUTS, ONE_STEP, fresh)

    return on_mesh


def with_loras(base: ModelSpec, *loras: LoraSpec) -> ModelSpec:
    return replace(base, loras=loras)


def alone(*specs: ModelSpec) -> list[RunOnRank]:
    return lora_programs.run_specs(0, "single", specs, INPUTS, ONE_STEP)


@pytest.fixture(scope="module")
def merged_by_others(folder: Path) -> Tensor:
    """The result of one process with the mixed LoRA at 0.8 and then the plain one at -0.5 in the file itself."""
    weights = merged(transformer_weights(SHAPE, seed=4), (MIXED, 0.8), (PLAIN, -0.5))
    save_file(weights, folder / "merged.safetensors")
    return alone(model_spec(folder / "merged.safetensors"))[0].result


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_matches_merging_in_one_process(
    mesh: str,
    run: Run,
    base: ModelSpec,
    lora: Callable[[str, float], LoraSpec],
    merged_by_others: Tensor,
) -> None:
    chain = (lora("mixed", 0.8), lora("plain", -0.5))
    (both,) = run(mesh, with_loras(base, *chain))[0]
    assert relative_error(both.result, merged_by_others) <= FORWARD_LIMIT


def test_loras_of_these_tests_and_their_order_matter(
    base: ModelSpec, lora: Callable[[str, float], LoraSpec], merged_by_others: Tensor
) -> None:
    mixed, plain = lora("mixed", 0.8), lora("plain", -0.5)
    for chain in ((), (mixed,), (plain,), (plain, mixed)):
        (other,) = alone(with_loras(base, *chain))
        assert relative_error(other.result, merged_by_others) > 100 * FORWARD_LIMIT


@pytest.mark.parametrize(
    ("mesh", "dtype", "names"),
    [
        # LoRAs that a chain is made of, one after the other: mixed, the same weaker, and plain.
        ("tp2", "bfloat16", ("", "m", "w", "wp", "pw", "p", "")),
        ("ulysses2-fsdp", "float32", ("m", "wp", "pw", "")),
    ],
)
def test_every_change_of_the_chain_is_a_fresh_load(
    mesh: str,
    dtype: str,
    names: tuple[str, ...],
    run: Run,
    base: ModelSpec,
    lora: Callable[[str, float], LoraSpec],
) -> None:
    base = replace(base, dtype=dtype)
    loras = {"m": lora("mixed", 1.0), "w": lora("mixed", 0.5), "p": lora("plain", 1.0)}
    specs = [with_loras(base, *(loras[name] for name in chain)) for chain in names]
    for kept, fresh in zip(run(mesh, *specs), run(mesh, *specs, fresh=True), strict=True):
        for one, other in zip(kept, fresh, strict=True):
            assert one.digests == other.digests != {}
            assert torch.equal(one.result, other.result)


def test_only_touched_tensors_are_read_again(folder: Path, base: ModelSpec, run: Run) -> None:
    """A column-parallel and a row-parallel weight, each by what its rank needs of file and LoRA."""
    names = ("blocks.0.ffn.0.weight", "blocks.2.self_attn.o.weight")
    parts = {name: PLAIN[name] for name in names}
    save_file(spelled(parts, "comfyui"), folder / "two.safetensors")
    spec = lora_spec(folder / "two.safetensors", 1.0)
    other = replace(spec, strength=2.0)
    weights = sum(4 * torch.Size(SHAPES[name]).numel() for name in names)
    factors = {end: [4 * parts[name][end].numel() for name in names] for end in ("up", "down")}
    (runs,) = run("single", base, with_loras(base, spec), with_loras(base, other), base)
    whole = weights + sum(factors["up"]) + sum(factors["down"])
    assert [each.bytes_read for each in runs[1:]] == [whole, whole, weights]
    assert runs[0].bytes_read > 10 * whole

    cut = weights // 2
    cut += factors["up"][0] // 2 + factors["down"][0] + factors["up"][1] + factors["down"][1] // 2
    for rank in run("tp2", base, with_loras(base, spec)):
        assert rank[1].bytes_read == cut


def test_fresh_load_reads_each_weight_once(
    base: ModelSpec, lora: Callable[[str, float], LoraSpec]
) -> None:
    plain, changed = alone(base)[0], alone(with_loras(base, lora("plain", 1.0)))[0]
    factors = sum(4 * tensors[end].numel() for tensors in PLAIN.values() for end in ("up", "down"))
    assert changed.bytes_read == plain.bytes_read + factors


def test_a_change_behind_another_does_not_read_what_only_the_first_touches(
    folder: Path, base: ModelSpec, lora: Callable[[str, float], LoraSpec]
) -> None:
    name = "blocks.1.cross_attn.k.weight"
    save_file(spelled({name: PLAIN[name]}, "kohya"), folder / "one.safetensors")
    second = lora_spec(folder / "one.safetensors", 0.5)
    runs = alone(with_loras(base, lora("mixed", 1.0)), with_loras(base, lora("mixed", 1.0), second))
    read = torch.Size(SHAPES[name]).numel() + sum(
        PLAIN[name][end].numel() for end in ("up", "down")
    )
    assert runs[1].bytes_read == 4 * read


def test_every_spelling_is_the_same_lora(
    folder: Path, base: ModelSpec, lora: Callable[[str, float], LoraSpec]
) -> None:
    loras = [lora("mixed", 0.7)]
    for number, spelling in enumerate(SPELLINGS):
        path = folder / f"spelling-{number}.safetensors"
        save_file(spelled(MIXED, spelling), path)
        loras.append(lora_spec(path, 0.7))
    same, *others = alone(*(with_loras(base, each) for each in loras))
    for spelling, run in zip(SPELLINGS, others, strict=True):
        assert not run.error, spelling
        assert run.bytes_read > 0, spelling
        assert run.digests == same.digests, spelling


def test_lora_that_diffusers_converted_is_the_same(folder: Path, base: ModelSpec) -> None:
    """Its own code renames keys, folds alpha (half of the rank: exactly) into down, and makes diff_b a bias of up."""
    from diffusers.loaders import lora_conversion_utils

    make = PartsMaker(SHAPES, seed=9)
    parts = {
        name: make.low_rank(name) | (make.bias(name) if "cross_attn" in name else {})
        for name in PLAIN
        if name.startswith("blocks.")
    }
    given = spelled(parts, "comfyui, A and B")
    save_file(given, folder / "given.safetensors")
    # It writes into some of what it is given.
    converted = lora_conversion_utils._convert_non_diffusers_wan_lora_to_diffusers(given)
    assert len(converted) > 2 * len(PLAIN) - 20
    assert not any(key.endswith("alpha") or "self_attn" in key for key in converted)
    save_file(converted, folder / "converted.safetensors")
    runs = alone(
        *(
            with_loras(base, lora_spec(folder / f"{name}.safetensors", 0.7))
            for name in ("given", "converted")
        )
    )
    assert runs[1].digests == runs[0].digests != alone(base)[0].digests


def test_merging_does_not_depend_on_the_piece(
    base: ModelSpec, lora: Callable[[str, float], LoraSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = with_loras(base, lora("mixed", 0.7))
    (whole,) = alone(spec)
    monkeypatch.setattr(lora_module, "PIECE_ITEMS", 5000)
    (pieces,) = alone(spec)
    assert relative_error(pieces.result, whole.result) <= FORWARD_LIMIT


def test_result_is_rounded_once(folder: Path, base: ModelSpec) -> None:
    """In bfloat16 the base is what the file says, not what a load without LoRAs would have kept of it."""
    name = "blocks.0.self_attn.q.weight"
    save_file(spelled({name: PLAIN[name]}, "bare"), folder / "one.safetensors")
    spec = with_loras(replace(base, dtype="bfloat16"), lora_spec(folder / "one.safetensors", 1.0))
    weight = transformer_weights(SHAPE, seed=4)[name]
    factors = PLAIN[name]
    change = factors["up"].float() @ factors["down"].float()
    change *= factors["alpha"].item() / len(factors["down"])
    expected = (weight + change).bfloat16()
    assert alone(spec)[0].digests[name] == lora_programs.digest(expected)


def broken(parts: Parts, name: str, end: str, value: float) -> dict[str, Tensor]:
    tensors = {key: tensor.clone() for key, tensor in spelled(parts, "comfyui").items()}
    key = f"diffusion_model.{name.removesuffix('.weight')}.{end}"
    tensors[key].view(-1)[-1] = value
    return tensors


@pytest.mark.parametrize(
    ("end", "value", "message"),
    [
        (
            "lora_up.weight",
            float("nan"),
            "ModelFileError: bad.safetensors: 'diffusion_model.blocks.2.ffn.0.lora_up.weight' holds",
        ),
        (
            "lora_down.weight",
            float("inf"),
            "ModelFileError: bad.safetensors: 'diffusion_model.blocks.2.ffn.0.lora_down.weight' holds",
        ),
        (
            "lora_up.weight",
            3e38,
            "ConfigError: blocks.2.ffn.0.weight becomes NaN or infinite with plain",
        ),
    ],
)
def test_bad_value_found_while_merging_costs_the_model_and_not_the_group(
    end: str,
    value: float,
    message: str,
    folder: Path,
    base: ModelSpec,
    lora: Callable[[str, float], LoraSpec],
    run: Run,
) -> None:
    """Only one rank of two sees it, when others' tensors are changed already."""
    save_file(broken(PLAIN, "blocks.2.ffn.0.weight", end, value), folder / "bad.safetensors")
    good = with_loras(base, lora("plain", 1.0))
    bad = with_loras(base, lora("plain", 1.0), lora_spec(folder / "bad.safetensors", 100.0))
    for runs in run("tp2", good, bad, good):
        assert runs[1].error.startswith(message), runs[1].error
        assert runs[2].digests == runs[0].digests
        assert runs[2].bytes_read == runs[0].bytes_read  # all of it


def test_lora_that_is_no_lora_leaves_the_loaded_model(
    folder: Path, base: ModelSpec, lora: Callable[[str, float], LoraSpec]
) -> None:
    save_file(
        {"blocks.0.self_attn.q.lora_A.weight": torch.zeros(4, 512)}, folder / "half.safetensors"
    )
    good = with_loras(base, lora("plain", 1.0))
    bad = with_loras(base, lora_spec(folder / "half.safetensors", 1.0))
    _, refused, again = alone(good, bad, good)
    assert "without its up" in refused.error
    assert again.bytes_read == 0


def test_lora_that_was_replaced_is_refused(
    folder: Path, base: ModelSpec, lora: Callable[[str, float], LoraSpec]
) -> None:
    stale = replace(lora("plain", 1.0), mtime_ns=1)
    (refused,) = alone(with_loras(base, stale))
    assert "changed after the job was made" in refused.error
