"""Single forwards as a group answers them: on every mesh against diffusers, and what is kept between them.

Tiny widths, random weights, float32 on the CPU. Under ComfyUI's own samplers: tests/comfyui/test_model_node.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import forward_programs
import pytest
import rank_programs
import torch
from forward_programs import Answer, Fault, run_forwards
from safetensors.torch import load_file
from torch import Tensor

from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.memory import rank_memory
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.workload import forward_workload
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.forward_runs import (
    PLANES,
    Call,
    build_call,
    build_forward_request,
    whole_velocity,
)
from devtools.mesh_runs import (
    LocalJob,
    build_local_runner,
    mesh_degrees,
    model_spec,
    relative_error,
)
from devtools.rank_pool import RankPool
from devtools.references import build_diffusers_transformer

pytestmark = pytest.mark.timeout(240)

LIMIT = 1e-5
I2V = WanShape(dim=512, ffn_dim=512, num_layers=2, in_dim=36, out_dim=16, text_dim=64)
KINDS = {"ti2v": TINY_TRANSFORMER, "i2v": I2V}
# With half of the ranks on another machine.
PLANES_OF_TWO = (("cfg2-ulysses2", "dp2-ulysses2"), ("tp2-sp", "tp2-sp"), ("ring2", "ring2"))


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    folder = tmp_path_factory.mktemp("forwards")
    for seed, (kind, shape) in enumerate(KINDS.items()):
        write_transformer(folder / f"{kind}.safetensors", shape, seed=seed)
    return {kind: model_spec(folder / f"{kind}.safetensors") for kind in KINDS}


@pytest.fixture(scope="module")
def references(specs: dict[str, ModelSpec]) -> dict[str, Any]:
    return {
        kind: build_diffusers_transformer(KINDS[kind], load_file(Path(spec.path)))
        for kind, spec in specs.items()
    }


def call_of(kind: str, mesh: str, **options: Any) -> Call:
    return build_call(KINDS[kind], mesh, **options)


def expected(reference: Any, call: Call) -> Tensor:
    """What diffusers predicts, sample by sample."""
    height, width = call.x.shape[3:]
    per_frame = (height + 1) // 2 * ((width + 1) // 2)
    velocities = []
    for index in range(call.x.shape[0]):
        one = slice(index, index + 1)
        x = call.x[one] if call.image is None else torch.cat([call.x[one], call.image[one]], 1)
        # diffusers would leave out the last row and column of odd sides, where ComfyUI repeats the first.
        x = torch.nn.functional.pad(x, (0, width % 2, 0, height % 2, 0, 0), mode="circular")
        times = call.timesteps[one]
        timestep = times[0] if times.shape[1] == 1 else times.repeat_interleave(per_frame, 1)
        velocities.append(reference(x, timestep, call.text[one]).sample[..., :height, :width])
    return torch.cat(velocities)


def answers(
    pool: RankPool,
    plane: str,
    spec: ModelSpec,
    *calls: Call,
    fault: Fault = rank_programs.no_fault,
    machines: int = 1,
) -> list[list[Answer]]:
    """By call, then by rank."""
    size = mesh_degrees(plane).world_size
    ranks = pool.run(size, run_forwards, plane, spec, calls, fault, machines)
    return [list(each) for each in zip(*ranks, strict=True)]


def written(ranks: Sequence[Answer]) -> Tensor:
    return whole_velocity([answer.velocity for answer in ranks])


@pytest.mark.parametrize(
    ("plane", "mesh", "machines"),
    [*((*meshes, 1) for meshes in PLANES), *((*meshes, 2) for meshes in PLANES_OF_TWO)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_on_every_mesh_is_what_diffusers_predicts(
    rank_pool: RankPool,
    specs: dict[str, ModelSpec],
    references: dict[str, Any],
    kind: str,
    plane: str,
    mesh: str,
    machines: int,
) -> None:
    calls = (
        call_of(kind, mesh),
        call_of(kind, mesh, size=(3, 5, 7), seed=2),  # odd sides, and other numbers
        call_of(kind, mesh, texts="cbac", seed=3),
    )
    found = answers(rank_pool, plane, specs[kind], *calls, machines=machines)
    for call, ranks in zip(calls, found, strict=True):
        assert [answer.error for answer in ranks] == [""] * len(ranks)
        assert relative_error(written(ranks), expected(references[kind], call)) <= LIMIT
        if machines > 1:  # where only those of ComfyUI's see the result
            assert bool(ranks[0].velocity.isfinite().all())


@pytest.mark.parametrize(
    ("fault", "plane", "mesh", "machines"),
    [
        (forward_programs.any_prompt_is_the_last_one, "single", "single", 1),
        (forward_programs.texts_in_another_order, "cfg2", "dp2", 1),
        (forward_programs.any_table_is_the_last_one, "ulysses2", "ulysses2", 1),
        (rank_programs.no_final_gather, "cfg2", "dp2", 2),
        (rank_programs.row_without_sum, "tp2", "tp2", 1),
        (rank_programs.no_ring, "ring2", "ring2", 1),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_comparison_notices(
    rank_pool: RankPool,
    specs: dict[str, ModelSpec],
    references: dict[str, Any],
    fault: Fault,
    plane: str,
    mesh: str,
    machines: int,
) -> None:
    calls = (call_of("ti2v", mesh), call_of("ti2v", mesh, texts="cdcd", seed=3))
    *_, ranks = answers(rank_pool, plane, specs["ti2v"], *calls, fault=fault, machines=machines)
    error = relative_error(written(ranks), expected(references["ti2v"], calls[-1]))
    assert error > 100 * LIMIT


def test_comparison_notices_parts_in_the_wrong_place(
    rank_pool: RankPool, specs: dict[str, ModelSpec]
) -> None:
    fault = forward_programs.parts_written_at_the_beginning
    call = call_of("ti2v", "ulysses2")
    (ranks,) = answers(rank_pool, "ulysses2", specs["ti2v"], call, fault=fault)
    with pytest.raises(AssertionError):
        written(ranks)


def test_a_text_is_encoded_once_for_as_long_as_it_is_asked_for(
    rank_pool: RankPool, specs: dict[str, ModelSpec]
) -> None:
    texts = ("abab", "abab", "cdcd", "abab", "abab", "efef", "cdcd")
    calls = [call_of("ti2v", "dp2", texts=each, seed=seed) for seed, each in enumerate(texts)]
    found = answers(rank_pool, "cfg2", specs["ti2v"], *calls)
    assert [[answer.encoded for answer in ranks] for ranks in found] == [
        [2, 2],
        [0, 0],
        [2, 2],
        [0, 0],
        [0, 0],
        [2, 2],
        [2, 2],  # as many are kept as are planned for
    ]


def test_a_rank_that_is_not_ready_delays_the_others(
    rank_pool: RankPool, specs: dict[str, ModelSpec], references: dict[str, Any]
) -> None:
    calls = [call_of("ti2v", "ulysses2", seed=seed) for seed in range(2)]
    fault = forward_programs.one_rank_is_not_ready
    for call, ranks in zip(
        calls, answers(rank_pool, "ulysses2", specs["ti2v"], *calls, fault=fault), strict=True
    ):
        assert [answer.error for answer in ranks] == ["", ""]
        assert relative_error(written(ranks), expected(references["ti2v"], call)) <= LIMIT


def test_kept_texts_are_those_that_the_plan_counts(specs: dict[str, ModelSpec]) -> None:
    runner, agreement = build_local_runner(0, "single")
    for texts in ("abab", "cdcd", "efef"):
        request, tensors = build_forward_request(
            specs["ti2v"], call_of("ti2v", "single", texts=texts)
        )
        runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
    held = runner._transformers.model.held
    assert held is not None
    kept = sum(
        part.nbytes
        for text in held.prompts._encoded.values()
        for each in text
        for part in (each.keys, each.values)
    )
    planned = rank_memory(forward_workload(request, TINY_TRANSFORMER), mesh_degrees("single"), 0)
    assert kept == planned.text


def test_what_does_not_go_together_is_refused_on_all_ranks_and_the_group_goes_on(
    rank_pool: RankPool, specs: dict[str, ModelSpec]
) -> None:
    good = call_of("ti2v", "ulysses2")
    wrong = {
        "the timesteps have shape [4, 2]": replace(good, timesteps=torch.ones(4, 2)),
        "3 prompts and text of shape": replace(good, names=("a", "b", "c")),
        "the latent has shape [4, 16": replace(good, x=good.x[:, :16]),
        "conditioning has shape [4, 8, 5]": replace(good, text=torch.ones(4, 8, 5)),
        "a job's mesh is auto": replace(good, mesh="auto"),
        "mesh": replace(good, mesh="tp2"),
        "image conditioning": replace(good, image=torch.ones(4, 20, 3, 6, 6)),
    }
    *found, last = answers(rank_pool, "ulysses2", specs["ti2v"], *wrong.values(), good)
    for words, ranks in zip(wrong, found, strict=True):
        for answer in ranks:
            assert words in answer.error, answer.error
    assert last[0].error == ""
    assert written(last).isfinite().all()
