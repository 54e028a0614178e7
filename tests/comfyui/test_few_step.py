"""Explicit sigmas and few-step presets: every mesh, and a real ComfyUI's SamplerCustom, give the same.

Refusals of bad SIGMAS in a graph are in test_bad_input.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import latent_of, succeed
from graphs import node, sampled_latent

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.solvers.schedules import FEW_STEP, given_sigmas
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import (
    CASES,
    Schedule,
    mesh_degrees,
    model_spec,
    relative_error,
    sample_rank,
)
from devtools.rank_pool import RankPool

pytestmark = pytest.mark.timeout(240)

FASTWAN, TURBO = FEW_STEP
# Noise is cut by tokens and samples; no block of the model sees it.
MESHES = ("ring3", "tp2-sp", "pp2", "dp2-cfg2")
STOCK_LIMIT = 1e-3


def test_presets_are_the_published_points() -> None:
    assert FEW_STEP[FASTWAN].sigmas == (1.0, 0.756757, 0.521739, 0.0)
    assert FEW_STEP[FASTWAN].timesteps == (1000.0, 757.0, 522.0)
    assert FEW_STEP[TURBO].timesteps == (1000.0, 750.0, 500.0, 250.0)
    for schedule in FEW_STEP.values():
        # Sigmas and timesteps say the same up to the rounding of one of them.
        assert schedule.timesteps == pytest.approx(
            [1000 * s for s in schedule.sigmas[:-1]], abs=0.5
        )
        assert schedule.start == 1


def test_given_sigmas_may_start_below_one_and_end_above_zero() -> None:
    schedule = given_sigmas((0.9, 0.5, 0.25))
    assert schedule.start == 0.9
    assert schedule.timesteps == (900.0, 500.0)
    assert given_sigmas((1.0005, 0.5, 0.0)).timesteps == pytest.approx((1000.5, 500.0))
    assert given_sigmas((1.0, 0.5, 0.5, 0.0)).sigmas == (1.0, 0.5, 0.5, 0.0)
    assert given_sigmas(()).timesteps == ()


@pytest.mark.parametrize(
    "sigmas",
    [(1.0,), (1.0, 1.0), (0.5, 0.6), (1.5, 0.0), (1.0, -0.1), (float("nan"), 0.0), [1.0] * 10002],
)
def test_given_sigmas_refuses_what_no_flow_model_follows(sigmas: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="SIGMAS"):
        given_sigmas(sigmas)


def test_noise_of_each_step_is_the_same_on_every_mesh(rank_pool: RankPool, tmp_path: Path) -> None:
    """Given frames, a batch, guidance, and a last sigma above 0, after which noise is needed once more."""
    path = tmp_path / "m.safetensors"
    write_transformer(path, TINY_TRANSFORMER, seed=4)
    inputs = CASES[-1].inputs(TINY_TRANSFORMER)
    generator = torch.Generator().manual_seed(2)
    inputs = replace(inputs, step_noise=torch.randn(3, *inputs.noisy.shape, generator=generator))
    schedule = Schedule(solver="lcm", sigmas=(1.0, 0.756757, 0.521739, 0.25), guidance=5.0)

    def sampled(mesh: str) -> torch.Tensor:
        ranks = mesh_degrees(mesh).world_size
        return rank_pool.run(ranks, sample_rank, mesh, model_spec(path), inputs, schedule)[0][0]

    expected = sampled("single")
    for mesh in MESHES:
        assert relative_error(sampled(mesh), expected) <= 1e-4, mesh


# ---- with a real ComfyUI

SAMPLINGS: tuple[tuple[str, float, dict[str, Any], str | None], ...] = (
    # sampler, cfg, sigmas by which node, what ours is set to instead of them
    ("lcm", 1.0, {"values": "1,0.75,0.5,0.25,0"}, TURBO),
    ("lcm", 1.0, {"values": "1,0.756757,0.521739,0"}, None),
    ("lcm", 5.0, {"values": "0.8,0.5,0.25"}, None),
    ("euler", 5.0, {"values": "1,0.9,0.6,0.3"}, None),
    ("uni_pc", 5.0, {"scheduler": "beta", "steps": 5, "denoise": 0.8}, None),
)


def test_sigmas_and_presets_equal_stock_sampler_custom(comfy: ComfyServer, seed: int) -> None:
    graphs.write_files(comfy.base)
    graph = sampled_latent(seed=seed, cfg=1.0, steps=1, shift=1.0)
    graph["stock"] = node("UNETLoader", unet_name=graphs.MODEL, weight_dtype="default")
    sampler = graph.pop("sampler")["inputs"]
    del graph["save"]
    shared = {name: sampler[name] for name in ("positive", "negative", "latent_image")}
    for index, (name, cfg, sigmas, preset) in enumerate(SAMPLINGS):
        if "values" in sigmas:
            graph[f"sigmas {index}"] = node("GivenSigmas", dims=0, **sigmas)
        else:
            graph[f"sigmas {index}"] = node("BasicScheduler", model=["stock", 0], **sigmas)
        graph[f"solver {index}"] = node("KSamplerSelect", sampler_name=name)
        graph[f"stock {index}"] = node(
            "SamplerCustom",
            model=["stock", 0],
            add_noise=True,
            noise_seed=seed,
            cfg=cfg,
            sampler=[f"solver {index}", 0],
            sigmas=[f"sigmas {index}", 0],
            **shared,
        )
        own = {**sampler, "sampler_name": name, "cfg": cfg, "sigmas": [f"sigmas {index}", 0]}
        if preset is not None:
            own = {**sampler, "cfg": 7.0, "few_step": preset}
        graph[f"own {index}"] = node("WanDistSampler", **own)
        for kind in ("stock", "own"):
            graph[f"save {kind} {index}"] = graphs.save_latent(f"{kind} {index}")
    result = succeed(comfy, graph)
    for index, sampling in enumerate(SAMPLINGS):
        ours, theirs = (
            latent_of(comfy, result, f"save {kind} {index}") for kind in ("own", "stock")
        )
        assert relative_error(ours, theirs) <= STOCK_LIMIT, sampling


def test_report_says_what_a_preset_overrides(comfy: ComfyServer, seed: int) -> None:
    graphs.write_files(comfy.base)
    graph = sampled_latent(seed=seed, length=5)
    graph["sampler"]["inputs"]["few_step"] = FASTWAN
    graph["text"] = node("PreviewAny", source=["sampler", 1])
    report = succeed(comfy, graph).outputs["text"]["text"][0]
    assert report.startswith(
        "few_step FastWan, 3 steps: lcm, cfg 1, sigmas 1, 0.756757, 0.521739, 0; not used: steps, cfg, sampler_name, "
        "scheduler, shift, denoise\n\nmesh ulysses4, 4 ranks, "
    )


def test_empty_sigmas_return_the_given_latent(comfy: ComfyServer, seed: int) -> None:
    """As SamplerCustom does, which gets them from BasicScheduler at denoise 0."""
    graphs.write_files(comfy.base)
    graph = sampled_latent(seed=seed)
    graph["sigmas"] = node("GivenSigmas", values="", dims=0)
    graph["sampler"]["inputs"]["sigmas"] = ["sigmas", 0]
    graph["given"] = graphs.save_latent("latent")
    result = succeed(comfy, graph)
    assert torch.equal(latent_of(comfy, result), latent_of(comfy, result, "given"))
