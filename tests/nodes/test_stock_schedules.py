"""Schedulers and SIGMAS beside ComfyUI's modules: equal to what its KSampler would run, or one sentence.

What is made of them is compared in a real ComfyUI (test_stock_graphs.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from comfyui_child import run_beside_comfyui

SCHEDULES: tuple[tuple[str, str, int, float], ...] = (
    # sampler, scheduler, steps, shift; ddim_uniform gives more steps than asked for, simple equal ones above 1000
    ("euler", "ddim_uniform", 7, 5.0),
    ("uni_pc", "ddim_uniform", 600, 8.0),
    ("euler", "simple", 1001, 5.0),
    ("lcm", "simple", 2500, 8.0),
    # Whose first sigma is just above 1 in float32.
    ("euler", "simple", 4, 4.03),
    ("euler", "late", 4, 5.0),
)
REFUSED: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("late", 1, ("scheduler 'late' fails for 1 steps at shift 5: ", "division by zero")),
    ("kl_optimal", 1, ("scheduler 'kl_optimal' for 1 steps at shift 5", "nan")),
    ("rising", 3, ("scheduler 'rising' for 3 steps at shift 5", "must fall")),
    ("sparse", 3, ("scheduler 'sparse' fails for 3 steps", "another scheduler")),
    ("nowhere", 3, ("scheduler 'nowhere' is not offered; choose simple",)),
)
CUTS: tuple[tuple[str, str, int], ...] = (
    # sampler, scheduler, steps: each is cut at every step and beyond
    ("euler", "simple", 5),
    ("uni_pc", "simple", 5),
    ("lcm", "ddim_uniform", 7),
)
ENDS = (*range(10), 10000)
GIVEN = ("sparse", "complex", "list", "two dims")
"""SIGMAS that are no list of numbers."""


def main(path: Path) -> None:
    """Ask for every schedule beside ComfyUI, and write what came of it."""
    sys.argv = [sys.argv[0], "--cpu"]  # ComfyUI reads it on import
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.model_sampling
    import comfy.samplers
    import torch

    from comfy_wan_dist.comfyui.schedule import build_schedule, sigmas_schedule
    from comfy_wan_dist.ipc.errors import ConfigError
    from comfy_wan_dist.solvers.schedules import cut_schedule
    from comfy_wan_dist.solvers.table import build_solver

    made: dict[str, Callable[[Any, int], Any]] = {
        "late": lambda _, steps: torch.tensor([1 - k / (steps - 1) for k in range(steps)]),
        "rising": lambda _, steps: torch.linspace(0.5, 1, steps + 1),
        "sparse": lambda _, steps: torch.linspace(1, 0, steps + 1).to_sparse(),
    }
    for name, function in made.items():
        comfy.samplers.SCHEDULER_HANDLERS[name] = comfy.samplers.SchedulerHandler(function)
    # In a new list, as some packs do it.
    comfy.samplers.KSampler.SCHEDULERS = [*comfy.samplers.KSampler.SCHEDULERS, *made]

    class Sampling(
        comfy.model_sampling.ModelSamplingDiscreteFlow,  # type: ignore[misc]
        comfy.model_sampling.CONST,  # type: ignore[misc]
    ):
        pass

    class Model:
        def __init__(self, shift: float) -> None:
            self.sampling = Sampling()
            self.sampling.set_parameters(shift=shift, multiplier=1000)

        def get_model_object(self, _: str) -> Any:
            return self.sampling

    equal = []
    for sampler, scheduler, steps, shift in SCHEDULES:
        schedule = build_schedule(
            sampler=sampler, scheduler=scheduler, steps=steps, shift=shift, denoise=1.0
        )
        stock = comfy.samplers.KSampler(
            Model(shift), steps, torch.device("cpu"), sampler, scheduler, 1.0
        )
        build_solver(sampler, sigmas=schedule.sigmas, step_noise=lambda _: torch.zeros(1))
        equal.append(list(schedule.sigmas) == stock.sigmas.tolist())

    def refusal(call: Callable[[], object]) -> str:
        try:
            call()
        except ConfigError as error:
            return str(error)
        return "not refused"

    said = [
        refusal(
            lambda scheduler=scheduler, steps=steps: build_schedule(  # type: ignore[misc]
                sampler="euler", scheduler=scheduler, steps=steps, shift=5.0, denoise=1.0
            )
        )
        for scheduler, steps, _ in REFUSED
    ]
    sigmas = torch.tensor([1.0, 0.5, 0.0])
    given = {
        "sparse": sigmas.to_sparse(),
        "complex": sigmas.to(torch.complex64),
        "list": [1.0, 0.5, 0.0],
        "two dims": sigmas[None],
    }
    said_of_given = [refusal(lambda name=name: sigmas_schedule(given[name])) for name in GIVEN]  # type: ignore[misc]
    # What KSampler hands to the function that samples, which is not called where it returns the latent as it is.
    taken: list[list[float]] = []

    def take(*arguments: Any, **_: Any) -> None:
        taken.append(arguments[7].tolist())

    comfy.samplers.sample = take
    cuts = []
    for sampler, scheduler, steps in CUTS:
        whole = build_schedule(
            sampler=sampler, scheduler=scheduler, steps=steps, shift=5.0, denoise=1.0
        )
        for start, end, leftover_noise in product(range(10), ENDS, (True, False)):
            taken.clear()
            stock = comfy.samplers.KSampler(
                Model(5.0), steps, torch.device("cpu"), sampler, scheduler, 1.0, model_options={}
            )
            stock.sample(
                None,
                None,
                None,
                1.0,
                latent_image=torch.zeros(1),
                start_step=start,
                last_step=end,
                force_full_denoise=not leftover_noise,
            )
            own = cut_schedule(whole, start=start, end=end, leftover_noise=leftover_noise)
            cuts.append([list(own.sigmas), *(taken or [[]])])
    path.write_text(
        json.dumps({"equal": equal, "said": said, "given": said_of_given, "cuts": cuts})
    )


@pytest.fixture(scope="module")
def outcome(comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("schedules") / "outcome.json"
    run_beside_comfyui(__file__, path, comfyui_path)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_schedules_are_those_of_ksampler(outcome: dict[str, Any]) -> None:
    assert outcome["equal"] == [True] * len(SCHEDULES)


def test_parts_are_those_of_ksampler(outcome: dict[str, Any]) -> None:
    assert len(outcome["cuts"]) == len(CUTS) * 10 * len(ENDS) * 2
    assert len({tuple(own) for own, _ in outcome["cuts"]}) > 100
    for own, stock in outcome["cuts"]:
        assert own == stock


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_scheduler_without_usable_sigmas_is_refused_in_a_sentence(
    outcome: dict[str, Any], index: int
) -> None:
    message = outcome["said"][index]
    assert [word for word in REFUSED[index][2] if word not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize("index", range(len(GIVEN)))
def test_sigmas_that_are_no_list_of_numbers_are_refused(
    outcome: dict[str, Any], index: int
) -> None:
    assert "the SIGMAS are no list of numbers" in outcome["given"][index]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
