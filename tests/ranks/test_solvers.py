"""Solvers: against ComfyUI's own functions and diffusers' UniPC, on an analytic denoiser.

ComfyUI is imported only by a child process: this file run as a script, which writes ComfyUI's
results to a file.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from comfyui_child import run_beside_comfyui
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.solvers import table, unipc
from comfy_wan_dist.solvers.table import (
    SolverKind,
    StepNoise,
    build_solver,
    last_sigma,
    solver_names,
)
from devtools.checkpoints import write_transformer
from devtools.mesh_runs import SIGMAS, Case, Schedule, model_spec, sample_rank

SEED = 1234
SHAPE = (1, 4, 3, 6, 5)
LENGTHS = (1, 2, 3, 4, 5, 12, 30)
COMFY_SOLVERS = ("euler", "lcm", "uni_pc", "uni_pc_bh2")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def shifted_sigmas(steps: int, *, shift: float, first: float, last: float) -> tuple[float, ...]:
    """steps + 1 float32-exact flow sigmas, from shift(first) down to shift(last)."""
    points = torch.linspace(first, last, steps + 1, dtype=torch.float64)
    return tuple((shift * points / (1 + (shift - 1) * points)).float().tolist())


# A whole run, one that starts below pure noise, and one that stops with noise left.
RUNS: dict[str, Callable[[int], tuple[float, ...]]] = {
    "full": lambda steps: shifted_sigmas(steps, shift=8.0, first=1.0, last=0.0),
    "denoise": lambda steps: shifted_sigmas(steps, shift=5.0, first=0.6, last=0.0),
    "leftover": lambda steps: shifted_sigmas(steps, shift=5.0, first=1.0, last=0.2),
}


def denoise(x: Tensor, sigma: float | Tensor) -> Tensor:
    """A clean prediction that bends with x and with sigma."""
    sigma = torch.as_tensor(sigma, dtype=x.dtype)
    return 0.7 * torch.tanh(1.3 * x + torch.sin(4 * sigma)) + 0.2 * sigma * torch.cos(2 * x)


def rough_prediction(index: int) -> Tensor:
    """A clean prediction for step `index` that has nothing to do with the one before it."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float32)


def close_sigmas(steps: int) -> tuple[float, ...]:
    """So close that the last moments of ComfyUI's UniPC are rounding and nothing else."""
    return shifted_sigmas(steps, shift=8.0, first=1.0, last=0.7)


def start_noise(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float32).to(dtype)


def seeded_noise(dtype: torch.dtype) -> Callable[[int], Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return lambda index: torch.randn(SHAPE, generator=generator, dtype=dtype)


def run_solver(
    name: str,
    sigmas: Sequence[float],
    x: Tensor,
    step_noise: Callable[[int], Tensor] | None = None,
) -> Tensor:
    solver = build_solver(name, sigmas=sigmas, step_noise=step_noise)
    for index, sigma in enumerate(sigmas[:-1]):
        x = solver.step(index, x, denoise(x, sigma))
    return x


# ---------------------------------------------------------------------------------- ComfyUI


def write_comfyui_results(path: Path) -> None:
    """Run ComfyUI's solvers on every case (in a process of its own) and save what they return."""
    sys.argv = [sys.argv[0], "--cpu"]  # ComfyUI reads it on import
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.model_sampling
    from comfy.extra_samplers import uni_pc
    from comfy.k_diffusion import sampling

    torch.set_num_threads(1)
    functions = {
        "euler": sampling.sample_euler,
        "lcm": sampling.sample_lcm,
        "uni_pc": uni_pc.sample_unipc,
        "uni_pc_bh2": uni_pc.sample_unipc_bh2,
    }

    class Model:
        # Where one ComfyUI or another looks for it.
        inner_model = SimpleNamespace(
            inner_model=SimpleNamespace(model_sampling=comfy.model_sampling.CONST()),
            model_patcher=SimpleNamespace(get_model_object=lambda _: comfy.model_sampling.CONST()),
        )

        def __call__(self, x: Tensor, sigma: Tensor, seed: int) -> Tensor:
            return denoise(x, sigma[0])

    class RoughModel(Model):
        calls = 0

        def __call__(self, x: Tensor, sigma: Tensor, seed: int) -> Tensor:
            self.calls += 1
            return rough_prediction(self.calls - 1)

    results = {}
    for name, function in functions.items():
        if name.startswith("uni_pc"):
            for steps in LENGTHS:
                results[f"{name}-rough-{steps}"] = function(
                    RoughModel(),
                    start_noise(torch.float32),
                    torch.tensor(close_sigmas(steps)),
                    extra_args={"seed": SEED},
                    disable=True,
                ).contiguous()
    for dtype_name, dtype in DTYPES.items():
        torch.set_default_dtype(dtype)  # ComfyUI's UniPC makes some of its scalars in it
        noise_sampler = sampling.default_noise_sampler(start_noise(dtype), seed=SEED)
        results[f"noise-{dtype_name}"] = torch.stack(
            [noise_sampler(None, None) for _ in range(max(LENGTHS))]
        )
        for name, function in functions.items():
            for run, make_sigmas in RUNS.items():
                for steps in LENGTHS:
                    sigmas = torch.tensor(make_sigmas(steps), dtype=dtype)
                    x = function(
                        Model(),
                        start_noise(dtype),
                        sigmas,
                        extra_args={"seed": SEED},
                        disable=True,
                    )
                    key = f"{name}-{run}-{steps}-{dtype_name}"
                    results[key] = x.contiguous()
                    results[f"{key}-last"] = sigmas[-1].clone()
    save_file(results, path)


@pytest.fixture(scope="module")
def comfyui_results(
    comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    path = tmp_path_factory.mktemp("comfyui") / "results.safetensors"
    run_beside_comfyui(__file__, path, comfyui_path)
    return load_file(path)


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", COMFY_SOLVERS)
def test_solver_matches_comfyui_in_float32(
    comfyui_results: dict[str, Tensor], name: str, run: str, steps: int
) -> None:
    dtype, noise = torch.float32, comfyui_results["noise-float32"]
    actual = run_solver(name, RUNS[run](steps), start_noise(dtype), noise.__getitem__)
    expected = comfyui_results[f"{name}-{run}-{steps}-float32"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", COMFY_SOLVERS)
def test_solver_matches_comfyui_in_float64(
    comfyui_results: dict[str, Tensor],
    name: str,
    run: str,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unipc, "_COMFY_DTYPE", torch.float64)
    dtype, noise = torch.float64, comfyui_results["noise-float64"]
    sigmas = RUNS[run](steps)
    if name.startswith("uni_pc") and sigmas[-1] == 0:
        sigmas = (*sigmas[:-1], 0.001)  # where ComfyUI ends in float64; 2^-10 is a float32 matter
    actual = run_solver(name, sigmas, start_noise(dtype), noise.__getitem__)
    expected = comfyui_results[f"{name}-{run}-{steps}-float64"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("name", ["uni_pc", "uni_pc_bh2"])
def test_uni_pc_loses_in_float32_what_comfyui_loses(
    comfyui_results: dict[str, Tensor], name: str, steps: int
) -> None:
    solver = build_solver(name, sigmas=close_sigmas(steps), step_noise=None)
    x = start_noise(torch.float32)
    for index in range(steps):
        x = solver.step(index, x, rough_prediction(index))
    expected = comfyui_results[f"{name}-rough-{steps}"]
    torch.testing.assert_close(x, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", COMFY_SOLVERS)
def test_last_sigma_is_the_one_that_comfyui_leaves(
    comfyui_results: dict[str, Tensor], name: str, run: str
) -> None:
    sigmas = RUNS[run](5)
    assert last_sigma(name, sigmas) == pytest.approx(
        comfyui_results[f"{name}-{run}-5-float64-last"].item(), abs=1e-12
    )


# ------------------------------------------------------------------------- the official UniPC


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-6)])
@pytest.mark.parametrize("last", [0.0, 0.2])
@pytest.mark.parametrize("steps", LENGTHS)
def test_wan_unipc_matches_diffusers(
    steps: int, last: float, dtype: torch.dtype, tolerance: float
) -> None:
    diffusers = pytest.importorskip("diffusers")
    sigmas = shifted_sigmas(steps, shift=5.0, first=0.999, last=last)
    scheduler = diffusers.UniPCMultistepScheduler(
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=1.0,
        solver_type="bh2",
    )
    scheduler.set_timesteps(sigmas=np.array(sigmas[:-1]))
    scheduler.sigmas = torch.tensor(sigmas, dtype=torch.float64)
    scheduler.set_begin_index(0)
    expected = start_noise(dtype)
    for timestep, sigma in zip(scheduler.timesteps, sigmas, strict=False):
        velocity = (expected - denoise(expected, sigma)) / sigma
        expected = scheduler.step(velocity, timestep, expected).prev_sample
    actual = run_solver("wan_unipc", sigmas, start_noise(dtype))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_wan_unipc_is_of_first_order_while_a_sigma_of_one_would_count() -> None:
    sigmas = (1.0, 0.9, 0.7, 0.4)

    def gain(index: int) -> float:
        """alpha * (1 - exp(-h)) of the step from sigmas[index]; exp(-h) is 0 at sigma 1."""
        sigma, sigma_next = sigmas[index : index + 2]
        return (1 - sigma_next) - (1 - sigma) / sigma * sigma_next

    solver = build_solver("wan_unipc", sigmas=sigmas, step_noise=None)
    x0 = start_noise(torch.float64)
    m0 = denoise(x0, 1.0)
    x1 = solver.step(0, x0, m0)
    torch.testing.assert_close(x1, 0.9 * x0 + gain(0) * m0, rtol=0, atol=1e-12)
    m1 = denoise(x1, 0.9)
    x1_corrected = x1 + gain(0) * 0.5 * (m1 - m0)
    x2 = solver.step(1, x1, m1)
    torch.testing.assert_close(x2, 0.7 / 0.9 * x1_corrected + gain(1) * m1, rtol=0, atol=1e-12)
    m2 = denoise(x2, 0.7)
    x2_corrected = x2 + gain(1) * 0.5 * (m2 - m1)
    x3 = solver.step(2, x2, m2)
    torch.testing.assert_close(x3, 0.4 / 0.7 * x2_corrected + gain(2) * m2, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------- all solvers


@pytest.mark.parametrize("name", ["euler", "lcm", "wan_unipc"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_solver_ends_exactly_on_the_last_prediction(name: str, steps: int) -> None:
    # So frames that a mask pins come back as they were.
    sigmas = RUNS["full"](steps)
    solver = build_solver(name, sigmas=sigmas, step_noise=seeded_noise(torch.float32))
    x = start_noise(torch.float32)
    for index, sigma in enumerate(sigmas[:-1]):
        denoised = denoise(x, sigma)
        x = solver.step(index, x, denoised)
    assert torch.equal(x, denoised)


@pytest.mark.parametrize("name", solver_names())
def test_solver_gives_a_shard_what_it_gives_the_whole(name: str) -> None:
    sigmas = RUNS["full"](6)
    noise = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    whole = run_solver(name, sigmas, start_noise(torch.float32), lambda index: noise[index])
    shard = start_noise(torch.float32).flatten()[17:101]
    part = run_solver(name, sigmas, shard, lambda index: noise[index].flatten()[17:101])
    # tanh and cos may round differently at another place of a vector; the solver does not.
    torch.testing.assert_close(part, whole.flatten()[17:101], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", solver_names())
def test_solver_leaves_its_inputs_alone(name: str) -> None:
    sigmas = RUNS["full"](5)
    solver = build_solver(name, sigmas=sigmas, step_noise=seeded_noise(torch.float32))
    x = start_noise(torch.float32)
    kept: list[tuple[Tensor, Tensor]] = []
    for index, sigma in enumerate(sigmas[:-1]):
        denoised = denoise(x, sigma)
        kept += [(x, x.clone()), (denoised, denoised.clone())]
        x = solver.step(index, x, denoised)
    assert all(torch.equal(tensor, before) for tensor, before in kept)


@pytest.mark.parametrize(
    ("name", "limit"), [("euler", 0), ("lcm", 0), ("wan_unipc", 2), ("uni_pc", 3)]
)
def test_solver_holds_no_prediction_longer_than_needed(name: str, limit: int) -> None:
    sigmas = RUNS["full"](8)
    solver = build_solver(name, sigmas=sigmas, step_noise=seeded_noise(torch.float32))
    x = start_noise(torch.float32)
    held: list[weakref.ref[Tensor]] = []
    most = 0
    for index, sigma in enumerate(sigmas[:-1]):
        denoised = denoise(x, sigma)
        held.append(weakref.ref(denoised))
        x = solver.step(index, x, denoised).clone()
        del denoised
        most = max(most, sum(ref() is not None for ref in held))
    assert most == limit
    assert all(ref() is None for ref in held)


def test_lcm_asks_for_noise_once_per_step_but_the_last() -> None:
    asked: list[int] = []

    def step_noise(index: int) -> Tensor:
        asked.append(index)
        return torch.zeros(SHAPE)

    run_solver("lcm", RUNS["full"](4), start_noise(torch.float32), step_noise)
    assert asked == [0, 1, 2]


def test_lcm_without_noise_is_refused_unless_its_only_step_ends_at_zero() -> None:
    with pytest.raises(ConfigError, match="noise"):
        build_solver("lcm", sigmas=(1.0, 0.5, 0.0), step_noise=None)
    with pytest.raises(ConfigError, match="noise"):
        build_solver("lcm", sigmas=(1.0, 0.5), step_noise=None)
    build_solver("lcm", sigmas=(1.0, 0.0), step_noise=None)


@pytest.mark.parametrize("name", ["uni_pc", "wan_unipc"])
@pytest.mark.parametrize("indices", [(1,), (0, 0), (0, 2), (0, 1, 2, 3)])
def test_multistep_solver_refuses_steps_out_of_order(name: str, indices: tuple[int, ...]) -> None:
    solver = build_solver(name, sigmas=(1.0, 0.8, 0.4, 0.0), step_noise=None)
    x = start_noise(torch.float32)
    for index in indices[:-1]:
        solver.step(index, x, x)
    with pytest.raises(ValueError, match="in order"):
        solver.step(indices[-1], x, x)


@pytest.mark.parametrize("name", solver_names())
@pytest.mark.parametrize(
    ("sigmas", "word"),
    [
        ((), "2 to 10001"),
        ((1.0,), "2 to 10001"),
        ((0.5, 0.9, 0.0), "fall"),
        ((1.0, 0.0, 0.0), "fall"),
        ((1.0, 1.0), "fall"),
        ((1.0, math.nan, 0.0), "nan"),
        ((1.2, 0.5, 0.0), "1.2"),
        ((1.0, 0.5, -0.1), "-0.1"),
    ],
)
def test_build_solver_refuses_bad_sigmas(name: str, sigmas: tuple[float, ...], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build_solver(name, sigmas=sigmas, step_noise=seeded_noise(torch.float32))


@pytest.mark.parametrize("name", ["uni_pc", "uni_pc_bh2", "wan_unipc"])
@pytest.mark.parametrize("sigmas", [(1.0, 0.5, 0.5, 0.0), (1.0, 1.0, 0.5, 0.0)])
def test_uni_pc_refuses_equal_sigmas(name: str, sigmas: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="cannot tell sigma"):
        build_solver(name, sigmas=sigmas, step_noise=None)


@pytest.mark.parametrize("name", solver_names())
def test_first_sigma_just_above_one_is_followed(name: str) -> None:
    """Rounding leads there, and other nodes; near what 1 gives."""
    noise = seeded_noise(torch.float32)(0)
    above, at = (
        run_solver(name, (first, 0.7, 0.0), start_noise(torch.float32), lambda _: noise)
        for first in (1.0005, 1.0)
    )
    torch.testing.assert_close(above, at, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", ["euler", "lcm"])
def test_step_between_equal_sigmas_changes_no_more_than_its_noise(name: str) -> None:
    sigmas = (1.0, 0.5, 0.5, 0.0)
    solver = build_solver(name, sigmas=sigmas, step_noise=seeded_noise(torch.float32))
    x, clean = start_noise(torch.float32), rough_prediction(0)
    expected = x if name == "euler" else 0.5 * clean + 0.5 * seeded_noise(torch.float32)(1)
    torch.testing.assert_close(solver.step(1, x, clean), expected)


def test_uni_pc_refuses_a_sigma_below_the_one_it_ends_at() -> None:
    with pytest.raises(ConfigError, match=r"0\.001"):
        build_solver("uni_pc", sigmas=(1.0, 0.0005, 0.0), step_noise=None)


def test_build_solver_names_the_choices_when_the_name_is_unknown() -> None:
    with pytest.raises(ConfigError, match="heun.*uni_pc, uni_pc_bh2, euler, lcm, wan_unipc"):
        build_solver("heun", sigmas=(1.0, 0.0), step_noise=None)


# ------------------------------------------------------------------------------ the table


class _Drift:
    """x, with noise on top of it as long as there is a next step."""

    def __init__(self, sigmas: tuple[float, ...], step_noise: StepNoise | None) -> None:
        self._sigmas, self._step_noise = sigmas, step_noise

    def step(self, index: int, x: Tensor, denoised: Tensor) -> Tensor:
        if self._sigmas[index + 1] == 0:
            return x
        assert self._step_noise is not None
        return x + self._step_noise(index)


def test_one_line_in_the_table_makes_a_solver_that_is_offered_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drift = SolverKind(name="drift", stock="euler", build=_Drift, needs_noise=True, last_sigma=0.5)
    monkeypatch.setattr(table, "SOLVERS", (*table.SOLVERS, drift))
    assert solver_names()[-1] == "drift"
    shape = WanShape(dim=256, ffn_dim=64, num_layers=1, in_dim=48, out_dim=48, text_dim=16)
    write_transformer(tmp_path / "m.safetensors", shape, seed=1)
    spec = model_spec(tmp_path / "m.safetensors")
    inputs = Case(name="t2v", frames=2, height=4, width=6).inputs(shape)
    schedule = Schedule(solver="drift", sigmas=SIGMAS, guidance=5.0)
    with pytest.raises(ConfigError, match="Solver drift adds noise"):
        sample_rank(0, "single", spec, inputs, schedule)
    noise = torch.randn(len(SIGMAS) - 2, *inputs.noisy.shape)
    result, _, _ = sample_rank(0, "single", spec, replace(inputs, step_noise=noise), schedule)
    # Divided by 1 - last_sigma, as ComfyUI's code around a solver does.
    torch.testing.assert_close(result, 2 * (inputs.noisy + noise.sum(0)))


def test_every_solver_of_comfyui_has_its_own_sigmas() -> None:
    others = {kind.name: kind.stock for kind in table.SOLVERS if kind.name not in COMFY_SOLVERS}
    assert others == {"wan_unipc": "euler"}
    assert all(kind.stock == kind.name for kind in table.SOLVERS if kind.name in COMFY_SOLVERS)


if __name__ == "__main__":
    write_comfyui_results(Path(sys.argv[1]))
