"""A condition is its reader, a line of the model's shape, and its use in the model; nothing between knows it.

The conditions here are added in just these places by condition_programs.py, and work on every kind of mesh.
"""

from __future__ import annotations

from dataclasses import replace

import condition_programs
import pytest
import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import COND, UNCOND, Condition, ModelSpec
from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import write_transformer
from devtools.mesh_runs import (
    RUN_LIMIT,
    SIGMAS,
    Case,
    Schedule,
    build_request,
    mesh_degrees,
    model_spec,
    relative_error,
    sample_rank,
)
from devtools.rank_pool import RankPool
from workers.sample_job import forward_inputs
from workers.sampling.forward import validate_conditions

SHAPE = WanShape(dim=512, ffn_dim=256, num_layers=2, in_dim=48, out_dim=48, text_dim=16)
CASE = Case(name="t2v", frames=3, height=6, width=6, batch=2)
SCHEDULE = Schedule(solver="euler", sigmas=SIGMAS, guidance=5.0)

Toys = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("conditions") / "m.safetensors"
    write_transformer(path, SHAPE, seed=9)
    return model_spec(path)


@pytest.fixture(scope="module")
def toys() -> Toys:
    """One for all samples of the prompt, one for each of the negative prompt; and the other way round."""
    generator = torch.Generator().manual_seed(5)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    return {
        COND: {"shift": noise(1, 48, 3, 6, 6), "more_text": noise(2, 7, 16)},
        UNCOND: {"shift": noise(2, 48, 3, 6, 6), "more_text": noise(1, 7, 16)},
    }


@pytest.fixture(scope="module")
def expected(spec: ModelSpec, toys: Toys) -> Tensor:
    inputs = CASE.inputs(SHAPE)
    return condition_programs.sample_with_toys(0, "single", spec, inputs, SCHEDULE, toys)


@pytest.mark.parametrize("mesh", ["cfg2-ulysses2-tp2", "tp2-sp", "pp2", "dp2-ring2"])
def test_a_new_condition_works_on_a_mesh(
    rank_pool: RankPool, spec: ModelSpec, toys: Toys, expected: Tensor, mesh: str
) -> None:
    results = rank_pool.run(
        mesh_degrees(mesh).world_size,
        condition_programs.sample_with_toys,
        mesh,
        spec,
        CASE.inputs(SHAPE),
        SCHEDULE,
        toys,
    )
    assert relative_error(results[0], expected) <= RUN_LIMIT


@pytest.mark.parametrize("branch", [COND, UNCOND])
@pytest.mark.parametrize("name", ["shift", "more_text"])
def test_each_branch_has_its_own(
    spec: ModelSpec, toys: Toys, expected: Tensor, branch: str, name: str
) -> None:
    changed = {key: dict(each) for key, each in toys.items()}
    changed[branch][name] = changed[branch][name].flip(-1)
    result = condition_programs.sample_with_toys(
        0, "single", spec, CASE.inputs(SHAPE), SCHEDULE, changed
    )
    assert relative_error(result, expected) > 100 * RUN_LIMIT


def test_without_it_the_result_is_another(spec: ModelSpec, expected: Tensor) -> None:
    plain = sample_rank(0, "single", spec, CASE.inputs(SHAPE), SCHEDULE)[0]
    assert relative_error(plain, expected) > 100 * RUN_LIMIT


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("shift", (1, 48, 3, 6, 4), "shift conditioning is shape .*need .1 or 2, 48, 3, 6, 6."),
        ("shift", (3, 48, 3, 6, 6), "shift conditioning is shape .3, 48"),
        ("more_text", (1, 7, 15), "more_text conditioning is shape .*need .1 or 2, tokens, 16."),
        ("more_text", (7, 16), "more_text conditioning is shape .7, 16."),
        ("more_text", (), "more_text conditioning is shape .., this model"),
        ("shift", None, "shift conditioning is none"),
        ("unknown", (1,), "unknown conditioning is shape .1., this model and latent need none"),
    ],
)
def test_one_that_does_not_fit_is_refused_by_name(
    toys: Toys, name: str, size: tuple[int, ...] | None, words: str
) -> None:
    given = dict(toys[COND])
    if size is None:
        del given[name]
    else:
        given[name] = torch.zeros(size)
    latent = torch.zeros(2, 48, 3, 6, 6)
    with condition_programs.toy_conditions(), pytest.raises(ConfigError, match=words):
        validate_conditions(given, SHAPE, latent, label="positive")


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ([("image", COND, 0), ("image", COND, 0)], "only once"),
        ([("image", "nobody", 0)], "must be of cond or uncond"),
        ([("image", COND, 7)], "lie in dim 7"),
    ],
)
def test_conditions_that_no_branch_can_take_are_refused(
    spec: ModelSpec, conditions: list[tuple[str, str, int]], words: str
) -> None:
    request, tensors = build_request(spec, CASE.inputs(SHAPE), SCHEDULE, mesh="single")
    given = tuple(
        Condition(name=name, branch=branch, tensor=request.noisy, batch_dim=dim)
        for name, branch, dim in conditions
    )
    with pytest.raises(ConfigError, match=words):
        forward_inputs(replace(request, conditions=given), lambda ref: tensors[ref.buffer])


def test_samples_may_lie_in_any_dim(spec: ModelSpec) -> None:
    request, tensors = build_request(spec, CASE.inputs(SHAPE), SCHEDULE, mesh="single")
    given = Condition(name="image", branch=COND, tensor=request.noisy, batch_dim=1)
    inputs = forward_inputs(replace(request, conditions=(given,)), lambda ref: tensors[ref.buffer])
    assert torch.equal(inputs.cond.conditions["image"], tensors[0].movedim(1, 0))
