"""Each of ComfyUI's samplers on a MODEL whose forwards run in a group, beside the same on the native MODEL.

Samplers, schedulers, guidance and given frames on two meshes: each value with each value of every other once, or all
combinations, of all samplers that this ComfyUI has, with --every-combination (`make samplers`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import graphs
import pytest
from comfy_kit import latent_of, succeed
from model_graphs import OWN, STOCK, add_both, both_models, calls_in, count_calls

from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import relative_error

LIMIT = 1e-4
STEPS = 4
SAMPLERS = (
    *("euler", "euler_ancestral", "heun", "dpm_2", "lms", "ddpm", "ddim", "lcm", "ipndm", "deis"),
    *("dpmpp_2m", "dpmpp_2m_sde", "dpmpp_sde", "dpmpp_3m_sde", "uni_pc", "res_multistep", "er_sde"),
)
SCHEDULERS = ("simple", "beta", "normal")
CFGS = (1.0, 5.0)
HAS_IMAGE = (False, True)
MESHES = ("cfg2-ulysses2", "tp2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """What a pair of runs has in common."""

    sampler: str
    scheduler: str
    cfg: float
    has_image: bool
    mesh: str


def every_combination(samplers: Sequence[str]) -> list[Combination]:
    return [
        Combination(sampler=sampler, scheduler=scheduler, cfg=cfg, has_image=has_image, mesh=mesh)
        for mesh, has_image, cfg, scheduler, sampler in itertools.product(
            MESHES, HAS_IMAGE, CFGS, SCHEDULERS, samplers
        )
    ]


def all_pairs(samplers: Sequence[str]) -> list[Combination]:
    """Each sampler with each scheduler, and with both values of each of the others."""
    found = []
    for (row, sampler), (column, scheduler) in itertools.product(
        enumerate(samplers), enumerate(SCHEDULERS)
    ):
        cfg, has_image, mesh = (
            (row // 2**place + (column == place)) % 2 for place in range(len(SCHEDULERS))
        )
        found.append(
            Combination(
                sampler=sampler,
                scheduler=scheduler,
                cfg=CFGS[cfg],
                has_image=HAS_IMAGE[has_image],
                mesh=MESHES[mesh],
            )
        )
    return found


def test_all_pairs_are_in_some_combination() -> None:
    def pairs(combinations: Sequence[Combination]) -> set[object]:
        return {
            pair
            for each in combinations
            for pair in itertools.combinations(enumerate(astuple(each)), 2)
        }

    few, every = all_pairs(SAMPLERS), every_combination(SAMPLERS)
    assert pairs(few) == pairs(every)
    assert len(few) == len(SAMPLERS) * len(SCHEDULERS) < len(set(every)) / 7


@pytest.fixture
def combinations(request: pytest.FixtureRequest, comfy: ComfyServer) -> list[Combination]:
    if not request.config.getoption("--every-combination"):
        return all_pairs(SAMPLERS)
    inputs = comfy.get("/object_info/KSampler")["KSampler"]["input"]["required"]
    (samplers, *_) = inputs["sampler_name"]
    assert set(SAMPLERS) <= set(samplers)
    return every_combination(samplers)


# A server and a group start within the test; all combinations take minutes.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh", MESHES)
def test_stock_samplers_give_what_they_give_on_the_native_model(
    comfy: ComfyServer, combinations: list[Combination], mesh: str, seed: int
) -> None:
    """Also with as many calls of the model, and with as many answers of the group."""
    graphs.write_files(comfy.base)
    errors: dict[Combination, float] = {}
    chosen = [each for each in combinations if each.mesh == mesh]
    for has_image, cfg, scheduler in itertools.product(HAS_IMAGE, CFGS, SCHEDULERS):
        graph = both_models(mesh=mesh, has_image=has_image)
        runs = {
            each.sampler: each
            for each in chosen
            if (each.has_image, each.cfg, each.scheduler) == (has_image, cfg, scheduler)
        }
        for sampler in runs:
            options: dict[str, Any] = dict(
                sampler_name=sampler, scheduler=scheduler, cfg=cfg, steps=STEPS
            )
            add_both(graph, sampler, seed=seed, **options)
        log = len(comfy.log)
        result = succeed(comfy, count_calls(graph))
        calls = calls_in(comfy.log[log:])
        for sampler, each in runs.items():
            own, stock = (
                latent_of(comfy, result, f"{sampler} {name} saved") for name in (OWN, STOCK)
            )
            errors[each] = relative_error(own, stock)
            count, said = calls[f"{sampler} {OWN}"]
            assert count >= STEPS - 1, each
            assert (count, "") == calls[f"{sampler} {STOCK}"], each
            assert said.split(" on mesh ")[0] == str(count), each
    assert errors.keys() == set(chosen)
    for sampler in dict.fromkeys(each.sampler for each in errors):
        found = [error for each, error in errors.items() if each.sampler == sampler]
        print(f"{mesh:14} {sampler:28} {len(found):3} runs, at most {max(found):.1e}")
    excess = {each: error for each, error in errors.items() if not error <= LIMIT}
    assert not excess, excess
