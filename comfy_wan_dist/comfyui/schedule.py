"""Sigmas as a stock KSampler would use them."""

from __future__ import annotations

from typing import Any

import comfy.model_sampling
import comfy.samplers
import torch
from torch import Tensor

from ..ipc.errors import ConfigError
from ..solvers.schedules import MAX_STEPS, Schedule, given_sigmas, wan_official
from ..solvers.table import find_solver

OFFICIAL_SCHEDULER = "wan_official"
MAX_WHOLE_STEPS = 10**7


def list_schedulers() -> list[str]:
    """KSampler's, those of other packs included, and the official one."""
    return [*comfy.samplers.KSampler.SCHEDULERS, OFFICIAL_SCHEDULER]


def build_schedule(
    *, sampler: str, scheduler: str, steps: int, shift: float, denoise: float
) -> Schedule:
    """Sigmas exactly as a stock KSampler behind ModelSamplingSD3(shift) would use them, or Wan's official ones.

    Empty for denoise 0, where KSampler returns its input.
    """
    # As ComfyUI does, denoise above 1 is taken for 1, and below 0 for 0.
    is_short = 1 <= steps <= MAX_STEPS and (denoise <= 0 or steps <= denoise * MAX_WHOLE_STEPS)
    if not (is_short and 0 < shift <= 1e30):
        raise ConfigError(
            f"shift is {shift}, steps {steps} and denoise {denoise}; shift must be above 0, steps from 1 to "
            f"{MAX_STEPS}, and denoise 0 or at least steps/{MAX_WHOLE_STEPS}"
        )
    solver = find_solver(sampler)
    if scheduler == OFFICIAL_SCHEDULER:
        return wan_official(steps, shift, denoise=min(denoise, 1.0))
    if scheduler not in list_schedulers():
        raise ConfigError(
            f"scheduler {scheduler!r} is not offered; choose {', '.join(list_schedulers())}"
        )
    asked = f"for {steps} steps at shift {shift:g}"
    try:
        stock = comfy.samplers.KSampler(
            _FlowModel(shift),
            steps,
            torch.device("cpu"),
            sampler=solver.stock,
            scheduler=scheduler,
            denoise=denoise,
        )
        points = stock.sigmas.tolist()
    except Exception as error:  # another pack's formula may raise anything
        raise ConfigError(
            f"scheduler {scheduler!r} fails {asked}: {error}; use more steps or another scheduler"
        ) from error
    return given_sigmas(points, source=f"the sigmas of scheduler {scheduler!r} {asked}")


def sigmas_schedule(sigmas: Any) -> Schedule:
    """The schedule of a SIGMAS. Raises ConfigError."""
    is_tensor = isinstance(sigmas, Tensor)
    if not is_tensor or (sigmas.dim(), sigmas.layout) != (1, torch.strided):
        got = type(sigmas).__name__
        if is_tensor:
            got = f"{sigmas.layout}, {sigmas.dtype}, shape {list(sigmas.shape)}"
        raise ConfigError(
            f"the SIGMAS are no list of numbers but {got}; use a node that makes SIGMAS, such as OptimalStepsScheduler"
        )
    return given_sigmas(sigmas.tolist())


class _FlowModel:
    """As much of a MODEL as ComfyUI's KSampler asks for its sigmas."""

    load_device = torch.device("cpu")

    def __init__(self, shift: float) -> None:
        self._sampling = comfy.model_sampling.ModelSamplingDiscreteFlow()
        self._sampling.set_parameters(shift=shift, multiplier=1000)

    def get_model_object(self, name: str) -> Any:
        if name != "model_sampling":
            raise KeyError(name)
        return self._sampling
