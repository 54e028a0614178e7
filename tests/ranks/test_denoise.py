"""The denoise loop: frame rows and masks, guidance, refusals, and how a run is stopped on all ranks.

Runs on a mesh go through the product's pipeline in a rank pool; solvers have their own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_programs
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError, JobCancelled
from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.solvers.table import build_solver
from devtools.checkpoints import transformer_weights, write_transformer
from devtools.mesh_runs import (
    SIGMAS,
    Case,
    Inputs,
    LocalJob,
    Schedule,
    build_local_runner,
    build_request,
    mesh_degrees,
    model_spec,
    relative_error,
    sample_rank,
)
from devtools.rank_pool import RankPool
from workers.model.tokens import grid_of, unpatchify
from workers.model.wan import WanModel
from workers.sampling.denoise import KeptTokens, denoise
from workers.sampling.forward import Forward, frame_rows, validate_latent, validate_text

SHAPE = WanShape(dim=256, ffn_dim=192, num_layers=1, in_dim=48, out_dim=48, text_dim=16, freq_dim=8)
PLAIN = Case(name="t2v", frames=2, height=4, width=6)
KEPT = Case(name="i2v", frames=2, height=4, width=6, frame_mask=((0, 1),))
EULER = Schedule(solver="euler", sigmas=SIGMAS, guidance=5.0)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("denoise") / "m.safetensors"
    write_transformer(path, SHAPE, seed=4)
    return model_spec(path)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What each forward of this process was called with: x and the keyword arguments."""
    calls: list[Mapping[str, Any]] = []
    original = WanModel.forward

    def recorded(self: WanModel, x: Tensor, **options: Any) -> Tensor:
        calls.append({"x": x.clone(), **options})
        return original(self, x, **options)

    monkeypatch.setattr(WanModel, "forward", recorded)
    return calls


def sample(spec: ModelSpec, inputs: Inputs, schedule: Schedule = EULER) -> Tensor:
    return sample_rank(0, "single", spec, inputs, schedule)[0]


# ---- rows and masks


def test_one_row_without_a_mask() -> None:
    factors, rows = frame_rows(None, batch=2, frames=3)
    assert torch.equal(factors, torch.ones(2, 1))
    assert rows == (0, 0, 0)


@pytest.mark.parametrize(
    ("mask", "row_count"),
    [
        ([[0.0, 1.0, 1.0]], 2),
        ([[1.0, 1.0, 1.0]], 1),
        ([[0.0, 0.5, 1.0]], 3),
        ([[1.0, 0.0, 1.0, 0.0]], 2),
        # One row serves frames only where all samples agree.
        ([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]], 3),
        ([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]], 2),
    ],
)
def test_rows_are_distinct_and_give_every_frame_its_factor(
    mask: list[list[float]], row_count: int
) -> None:
    frame_mask = torch.tensor(mask)
    factors, rows = frame_rows(frame_mask, batch=frame_mask.shape[0], frames=frame_mask.shape[1])
    assert factors.shape == (frame_mask.shape[0], row_count)
    assert torch.equal(factors[:, list(rows)], frame_mask)


def test_blend_keeps_what_is_clean_to_the_bit() -> None:
    clean, x = torch.randn(2, 1, 5, 4)
    mask = torch.tensor([0.0, 1.0, 0.25, 1.0, 0.0]).view(1, 5, 1).expand(1, 5, 4)
    blended = KeptTokens(clean=clean, mask=mask).blend(x)
    assert torch.equal(blended[:, [0, 4]], clean[:, [0, 4]])
    assert torch.equal(blended[:, [1, 3]], x[:, [1, 3]])
    assert torch.allclose(blended[:, 2], 0.75 * clean[:, 2] + 0.25 * x[:, 2])


@pytest.mark.parametrize("start", [1.0, 0.9])
def test_model_of_one_timestep_is_given_what_is_kept_as_noisy_as_the_rest(
    tmp_path: Path, forwards: list[Mapping[str, Any]], start: float
) -> None:
    """Also where a run starts from more noise than its first sigma says, as the official schedule does."""
    shape = replace(SHAPE, in_dim=16, out_dim=16)
    write_transformer(tmp_path / "m.safetensors", shape, seed=4)
    inputs = replace(PLAIN.inputs(shape), uncond=None)
    noise, clean = inputs.noisy, torch.full_like(inputs.noisy, 0.5)
    inputs = replace(
        inputs,
        noisy=torch.lerp(clean, noise, start),
        clean=clean,
        mask=torch.zeros_like(noise),
    )
    sigmas = (0.9, 0.5, 0.0)
    schedule = Schedule(solver="euler", sigmas=sigmas, guidance=1.0, start=start)
    sample(model_spec(tmp_path / "m.safetensors"), inputs, schedule)
    grid = grid_of(noise)
    for call, sigma in zip(forwards, sigmas, strict=False):
        seen = unpatchify(call["x"], grid)
        assert torch.allclose(seen, torch.lerp(clean, noise, sigma), atol=1e-6)


@pytest.mark.parametrize("solver", ["euler", "wan_unipc"])
def test_given_frames_come_back_to_the_bit(spec: ModelSpec, solver: str) -> None:
    inputs = KEPT.inputs(SHAPE)
    assert inputs.clean is not None
    result = sample(spec, inputs, replace(EULER, solver=solver))
    assert torch.equal(result[:, :, 0], inputs.clean[:, :, 0])
    assert relative_error(result[:, :, 1], inputs.clean[:, :, 1]) > 0.1


def test_model_sees_given_frames_clean_and_at_timestep_0(
    spec: ModelSpec, forwards: list[Mapping[str, Any]]
) -> None:
    inputs = KEPT.inputs(SHAPE)
    assert inputs.clean is not None
    sample(spec, inputs)
    grid = grid_of(inputs.clean)
    assert len(forwards) == 2 * (len(SIGMAS) - 1)
    for call, sigma in zip(forwards[::2], SIGMAS, strict=False):
        first, second = call["runs"]
        assert (first.start, first.stop) == (0, grid.tokens_per_frame)
        timesteps = call["timesteps_BR"][0]
        assert timesteps[first.row] == 0
        assert timesteps[second.row] == pytest.approx(1000 * sigma)
        # Token 0 is the top left patch, in the order (row, column, channel).
        patch = inputs.clean[0, :, 0, :2, :2].permute(1, 2, 0).flatten()
        assert torch.equal(call["x"][0, 0], patch)


def test_mask_of_one_channel_serves_all(spec: ModelSpec) -> None:
    inputs = KEPT.inputs(SHAPE)
    assert inputs.mask is not None
    whole = replace(inputs, mask=inputs.mask.expand_as(inputs.noisy).contiguous())
    assert torch.equal(sample(spec, inputs), sample(spec, whole))


def test_lcm_takes_its_noise_step_by_step(rank_pool: RankPool, spec: ModelSpec) -> None:
    inputs = PLAIN.inputs(SHAPE)
    noise = torch.randn(
        len(SIGMAS) - 2, *inputs.noisy.shape, generator=torch.Generator().manual_seed(2)
    )
    schedule = replace(EULER, solver="lcm")
    noised = replace(inputs, step_noise=noise)
    expected = sample(spec, noised, schedule)
    assert (
        relative_error(sample(spec, replace(inputs, step_noise=noise.flip(0)), schedule), expected)
        > 1e-2
    )
    sharded = rank_pool.run(2, sample_rank, "ulysses2", spec, noised, schedule)[0][0]
    assert relative_error(sharded, expected) <= 1e-4


# ---- odd sides


@pytest.mark.parametrize("solver", ["euler", "uni_pc"])
def test_padding_is_made_of_the_first_values_before_every_forward(
    spec: ModelSpec, forwards: list[Mapping[str, Any]], solver: str
) -> None:
    inputs = Case(name="odd", frames=2, height=3, width=5, frame_mask=((0.4, 1),)).inputs(SHAPE)
    result = sample(spec, inputs, replace(EULER, solver=solver))
    assert result.shape == inputs.noisy.shape
    assert len(forwards) == 2 * (len(SIGMAS) - 1)
    for call in forwards:
        padded = unpatchify(call["x"], grid_of(inputs.noisy))
        assert padded.shape[3:] == (4, 6)
        assert torch.equal(padded[..., 3, :], padded[..., 0, :])
        assert torch.equal(padded[..., 5], padded[..., 0])


# ---- guidance


def test_without_negative_prompt_one_branch_runs(
    spec: ModelSpec, forwards: list[Mapping[str, Any]]
) -> None:
    inputs = replace(PLAIN.inputs(SHAPE), uncond=None)
    unguided = sample(spec, inputs, replace(EULER, guidance=1.0))
    assert len(forwards) == len(SIGMAS) - 1
    # Guidance of 1 is the prompt's prediction alone, and the other one is spared.
    guided = sample(spec, PLAIN.inputs(SHAPE), replace(EULER, guidance=1.0))
    assert len(forwards) == 2 * (len(SIGMAS) - 1)
    assert torch.equal(unguided, guided)
    nearly = sample(spec, PLAIN.inputs(SHAPE), replace(EULER, guidance=1.0 + 1e-7))
    assert len(forwards) == 4 * (len(SIGMAS) - 1)
    assert relative_error(unguided, nearly) <= 1e-6


def test_guidance_moves_from_the_negative_to_the_positive_prompt(spec: ModelSpec) -> None:
    inputs = PLAIN.inputs(SHAPE)
    one_step = replace(EULER, sigmas=(0.8, 0.0))
    only = [
        sample(spec, replace(inputs, cond=context, uncond=None), one_step)
        for context in (inputs.cond, inputs.uncond)
        if context is not None
    ]
    expected = only[1] + 5.0 * (only[0] - only[1])
    assert relative_error(sample(spec, inputs, one_step), expected) <= 1e-5


def test_guidance_planes_without_negative_prompt_agree(
    rank_pool: RankPool, spec: ModelSpec
) -> None:
    inputs = replace(PLAIN.inputs(SHAPE), uncond=None)
    result, ledger, _ = rank_pool.run(2, sample_rank, "cfg2", spec, inputs, EULER)[0]
    assert torch.equal(result, sample(spec, inputs))
    assert ledger == ()


def test_run_exchanges_only_guidance_and_gathers_once(rank_pool: RankPool, spec: ModelSpec) -> None:
    inputs = KEPT.inputs(SHAPE)
    _, ledger, _ = rank_pool.run(4, sample_rank, "cfg2-ulysses2", spec, inputs, EULER)[0]
    calls = {(entry.op, entry.axis): entry.calls for entry in ledger}
    steps = len(SIGMAS) - 1
    assert calls == {
        ("all_gather", "cfg"): steps,
        ("all_to_all", "ulysses"): 2 * steps * SHAPE.num_layers,
        ("all_gather", "ulysses"): 1,
    }
    sent = {(entry.op, entry.axis): entry.bytes for entry in ledger}
    own = 12 // 2 * 192 * 4
    assert sent["all_gather", "cfg"] == steps * own
    assert sent["all_gather", "ulysses"] == own


def test_shards_are_copies_of_the_shared_tensors(spec: ModelSpec) -> None:
    inputs = KEPT.inputs(SHAPE)
    before = [
        t.clone() for t in (inputs.noisy, inputs.clean, inputs.mask, inputs.cond) if t is not None
    ]
    sample(spec, inputs)
    after = [t for t in (inputs.noisy, inputs.clean, inputs.mask, inputs.cond) if t is not None]
    assert all(map(torch.equal, before, after))


# ---- refusals


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (1, 16, 2, 4, 4),
            r"shape \[1, 16, 2, 4, 4\]; this model needs \[batch, 48, frames.*use a latent node",
        ),
        ((48, 2, 4, 4), r"shape \[48, 2, 4, 4\]; this model needs"),
        ((1, 48, 2, 0, 4), r"shape \[1, 48, 2, 0, 4\]; this model needs .*height/16"),
        ((0, 48, 2, 4, 4), r"shape \[0, 48, 2, 4, 4\]; this model needs"),
        ((1, 48, 0, 4, 4), r"shape \[1, 48, 0, 4, 4\]; this model needs"),
    ],
)
def test_latent_that_does_not_suit_the_model_is_refused(
    shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_latent(shape, SHAPE)


def test_latent_of_an_odd_token_count_is_accepted() -> None:
    validate_latent((3, 48, 3, 6, 6), SHAPE)
    validate_latent((3, 48, 3, 5, 7), SHAPE)


@pytest.mark.parametrize("shape", [(20, 16), (1, 20, 8), (3, 20, 16), (0, 20, 16), (1, 1, 20, 16)])
def test_text_that_does_not_suit_the_model_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_text(torch.zeros(shape), text_dim=16, batch=2, label="negative")
    assert (
        f"the negative conditioning has shape {list(shape)}; this model needs [1, tokens, 16]"
        in str(caught.value)
    )
    assert "CLIPLoader type wan" in str(caught.value)


@pytest.mark.parametrize("batch", [1, 2])
def test_text_for_all_or_for_each_is_accepted(batch: int) -> None:
    validate_text(torch.zeros(batch, 20, 16), text_dim=16, batch=2, label="positive")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: replace(i, noisy=torch.zeros(1, 16, 2, 4, 6)), "the latent has shape"),
        (lambda i: replace(i, cond=torch.zeros(1, 20, 8)), "the positive conditioning has shape"),
        (lambda i: replace(i, uncond=torch.zeros(1, 20, 8)), "the negative conditioning has shape"),
    ],
)
def test_job_with_unfit_inputs_is_refused(
    spec: ModelSpec, change: Callable[[Inputs], Inputs], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(spec, change(PLAIN.inputs(SHAPE)))


def test_timesteps_that_do_not_go_with_the_sigmas_are_refused(spec: ModelSpec) -> None:
    request, tensors = build_request(spec, PLAIN.inputs(SHAPE), EULER, mesh="single")
    runner, agreement = build_local_runner(0, "single")
    wrong = replace(request, timesteps=request.timesteps[:-1])
    with pytest.raises(
        ConfigError, match="3 timesteps were given for 5 sigmas; there must be one timestep"
    ):
        runner.run(wrong, LocalJob(tensors, agreement))  # type: ignore[arg-type]


def test_unknown_dtype_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(
        ConfigError, match="dtype 'int8' is not known; use float32, bfloat16, float16"
    ):
        sample(replace(spec, dtype="int8"), PLAIN.inputs(SHAPE))


def test_video_with_too_few_tokens_is_refused_on_all_ranks(
    rank_pool: RankPool, spec: ModelSpec
) -> None:
    inputs = Case(name="one token", frames=1, height=2, width=2).inputs(SHAPE)
    errors = rank_pool.run(2, rank_programs.sample_error, "ulysses2", spec, inputs, EULER)
    assert len(set(errors)) == 1
    assert errors[0].startswith(
        "MeshError: mesh ulysses2 cuts the video into 2 token shards but it has only 1"
    )


def test_mesh_that_does_not_divide_the_model_is_refused_on_all_ranks(
    rank_pool: RankPool, spec: ModelSpec
) -> None:
    errors = rank_pool.run(4, rank_programs.sample_error, "tp4", spec, PLAIN.inputs(SHAPE), EULER)
    expected = (
        "MeshError: tp4 does not divide this model's 2 heads and 192 FFN channels; tp may be 1, 2"
    )
    assert errors == [expected] * 4


@pytest.mark.parametrize("mesh", ["single", "ulysses2"])
def test_result_with_nan_is_refused_on_all_ranks(
    rank_pool: RankPool, tmp_path: Path, mesh: str
) -> None:
    weights = transformer_weights(SHAPE, seed=4)
    weights["blocks.0.ffn.2.bias"][3] = float("nan")
    save_file(weights, tmp_path / "nan.safetensors")
    spec = model_spec(tmp_path / "nan.safetensors")
    world_size = 1 if mesh == "single" else 2
    errors = rank_pool.run(
        world_size, rank_programs.sample_error, mesh, spec, PLAIN.inputs(SHAPE), EULER
    )
    expected = (
        "ConfigError: the model produced NaN or infinite values; use the dtype bfloat16 or float32"
    )
    assert all(error.startswith(expected) for error in errors)


# ---- stopping, and one runner for many jobs


@pytest.mark.parametrize(
    ("mesh", "stopping_rank"),
    [("single", 0), ("ulysses2", 0), ("ulysses2", 1), ("cfg2-fsdp", 1), ("cfg2-tp2", 3)],
)
def test_stop_told_to_one_rank_ends_the_job_on_all_and_the_next_is_right(
    rank_pool: RankPool, spec: ModelSpec, mesh: str, stopping_rank: int
) -> None:
    inputs = PLAIN.inputs(SHAPE)
    answers = rank_pool.run(
        mesh_degrees(mesh).world_size,
        rank_programs.stop_then_sample,
        mesh,
        spec,
        inputs,
        EULER,
        stopping_rank,
    )
    for ended, reports, _ in answers:
        assert ended == "JobCancelled: the job was stopped on request"
        # One step was done; the vote before the second ended the run.
        assert [report for report in reports if report[0] == "sample"] == [("sample", 1, 4)]
    assert relative_error(answers[0][2], sample(spec, inputs)) <= 1e-4


def test_progress_counts_bytes_then_steps(spec: ModelSpec) -> None:
    request, tensors = build_request(spec, PLAIN.inputs(SHAPE), EULER, mesh="single")
    runner, agreement = build_local_runner(0, "single")
    first, second = LocalJob(tensors, agreement), LocalJob(tensors, agreement)
    stats = runner.run(request, first)  # type: ignore[arg-type]
    loads = [report for report in first.reports if report[0] == "load"]
    assert loads[-1] == ("load", stats.bytes_read, stats.bytes_read)
    assert first.reports[len(loads) :] == [("sample", done, 4) for done in (1, 2, 3, 4)]
    again = runner.run(request, second)  # type: ignore[arg-type]
    assert again.bytes_read == 0
    assert [report[0] for report in second.reports] == ["sample"] * 4


def test_one_runner_serves_jobs_of_different_sizes(spec: ModelSpec) -> None:
    runner, agreement = build_local_runner(0, "single")
    for case in (PLAIN, KEPT, Case(name="larger", frames=3, height=6, width=4), PLAIN):
        inputs = case.inputs(SHAPE)
        request, tensors = build_request(spec, inputs, EULER, mesh="single")
        runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
        assert torch.equal(tensors[-1], sample(spec, inputs))


def test_loop_asks_before_every_step(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    original = Forward.predict

    def recorded(*arguments: Any) -> Tensor:
        order.append("forward")
        return original(*arguments)

    class AskedJob(LocalJob):
        def agree_stop(self) -> bool:
            order.append("ask")
            return False

    monkeypatch.setattr(Forward, "predict", recorded)
    request, tensors = build_request(spec, PLAIN.inputs(SHAPE), EULER, mesh="single")
    runner, agreement = build_local_runner(0, "single")
    runner.run(request, AskedJob(tensors, agreement))  # type: ignore[arg-type]
    assert order == ["ask", "forward"] * 4


# ---- observers


class Watch:
    """An observer that keeps what it is told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.heard: list[tuple[str, int]] = []
        self.seen: list[tuple[Tensor, Tensor]] = []
        self._stop_at = stop_at

    def before_step(self, index: int) -> None:
        self.heard.append(("before", index))
        if index == self._stop_at:
            raise JobCancelled("enough")

    def after_step(self, index: int, x: Tensor, denoised: Tensor) -> None:
        self.heard.append(("after", index))
        self.seen.append((x, denoised))


class HalfForward:
    """Stands for a Forward: the velocity is half of x."""

    def predict(self, x: Tensor, timestep: float) -> Tensor:
        return x / 2


def watched(*observers: Watch, kept: KeptTokens | None = None) -> Tensor:
    return denoise(
        torch.ones(1, 4, 8),
        forward_at=lambda index: HalfForward(),  # type: ignore[arg-type, return-value]
        sigmas=SIGMAS,
        timesteps=EULER.timesteps,
        solver=build_solver("euler", sigmas=SIGMAS, step_noise=None),
        kept=kept,
        observers=observers,
    )


def test_observers_hear_of_every_step_in_order() -> None:
    first, second = Watch(), Watch()
    result = watched(first, second)
    steps = range(len(SIGMAS) - 1)
    assert first.heard == second.heard == [(w, i) for i in steps for w in ("before", "after")]
    for index, (x, denoised) in enumerate(first.seen):
        assert torch.allclose(denoised, x - SIGMAS[index] * x / 2)
    assert torch.equal(first.seen[-1][1], result)
    assert torch.equal(watched(), result)


def test_observers_see_kept_tokens_in_x_and_in_the_prediction() -> None:
    clean, mask = torch.full((1, 4, 8), 9.0), torch.ones(1, 4, 8)
    mask[:, 0] = 0
    watch = Watch()
    watched(watch, kept=KeptTokens(clean=clean, mask=mask))
    for x, denoised in watch.seen:
        assert bool((x[:, 0] == 9).all())
        assert bool((denoised[:, 0] == 9).all())


def test_what_an_observer_raises_ends_the_run() -> None:
    stopping, behind = Watch(stop_at=2), Watch()
    with pytest.raises(JobCancelled):
        watched(stopping, behind)
    assert stopping.heard[-1] == ("before", 2)
    assert behind.heard[-1] == ("after", 1)
