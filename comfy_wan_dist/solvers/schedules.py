"""Sigmas and model timesteps of a run, as the sampler nodes put them into a job.

Covered: the official Wan schedule, those of few-step models, and the timesteps that go with sigmas from ComfyUI.
Not covered: ComfyUI's own schedulers (comfyui/schedule.py asks ComfyUI) and solvers (table.py).

Source: Wan2.2, wan/utils/fm_solvers_unipc.py (set_timesteps); ComfyUI 0.3.75, comfy/samplers.py
(KSampler.set_steps) for the meaning of `denoise`; FastVideo's DMD stage and the inference code of
Wan2.2-TI2V-5B-Turbo for theirs. Formulas and numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ipc.errors import ConfigError

# Timesteps of the training schedule: the model is given t = 1000 * sigma.
TRAIN_TIMESTEPS = 1000
MAX_STEPS = 10000
SLACK = 0.001
"""How far above 1 a sigma may lie, as by rounding; ComfyUI goes on with it."""

# 1 - 1/1000 after the official code has stored it as float32. The tail decides on which side of an
# integer some timesteps lie before they are truncated.
_OFFICIAL_FIRST_SIGMA = 0.9990000128746033


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The points of a run.

    sigmas: N + 1 noise levels, as validate_sigmas takes them; the last is where the run ends.
    timesteps: N values, what the model is told at sigmas[0 ... N-1], [0, 1000] for sigmas to 1.
    start: share of noise in the latent that the run begins with, like a sigma.
    """

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]
    start: float

    def listed(self) -> str:
        """The sigmas as a report shows them."""
        shown = [f"{sigma:.6g}" for sigma in self.sigmas]
        return ", ".join(shown if len(shown) <= 12 else [*shown[:10], "...", shown[-1]])


FEW_STEP = {
    # The nearest entries of a table at shift 8; the model is told the whole numbers nevertheless.
    "FastWan, 3 steps": Schedule(
        sigmas=(1.0, 0.756757, 0.521739, 0.0), timesteps=(1000.0, 757.0, 522.0), start=1.0
    ),
    "Turbo, 4 steps": Schedule(
        sigmas=(1.0, 0.75, 0.5, 0.25, 0.0), timesteps=(1000.0, 750.0, 500.0, 250.0), start=1.0
    ),
}
"""FastWan2.2-TI2V-5B and Wan2.2-TI2V-5B-Turbo as they were trained: with FEW_STEP_SOLVER, without guidance."""
FEW_STEP_SOLVER = "lcm"


def wan_official(steps: int, shift: float, *, denoise: float = 1.0) -> Schedule:
    """Return the schedule of the official Wan2.2 code for its UniPC.

    Sigmas are S*u / (1 + (S-1)*u) with S = shift and u = 0.999 * (1 - i/N), then 0; timesteps are
    1000 * sigma without the fraction. The first sigma is just below 1, yet the official code
    starts from pure noise.
    denoise: as in ComfyUI's KSampler: below 1, the last `steps` steps of int(steps / denoise); at
    0 or below, an empty schedule (no steps: the latent stays as it is).
    Raises ConfigError when steps < 1, or shift or denoise is out of range.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}, but a schedule has at least 1.")
    if not 0 < shift < math.inf:
        raise ConfigError(
            f"shift is {shift}, but must be a positive number; 5 is usual for Wan2.2 5B."
        )
    if not denoise <= 1:  # NaN fails this as well
        raise ConfigError(f"denoise is {denoise}, but must lie between 0 and 1.")
    if denoise <= 0:
        return Schedule(sigmas=(), timesteps=(), start=0.0)
    # ComfyUI takes what is above 0.9999 for 1.
    full_steps = steps if denoise > 0.9999 else int(steps / denoise)
    increment = -_OFFICIAL_FIRST_SIGMA / full_steps
    sigmas = []
    for index in range(full_steps):
        u = index * increment + _OFFICIAL_FIRST_SIGMA
        sigmas.append(shift * u / (1 + (shift - 1) * u))
    timesteps = [float(int(sigma * TRAIN_TIMESTEPS)) for sigma in sigmas]
    return Schedule(
        sigmas=(*sigmas[-steps:], 0.0),
        timesteps=tuple(timesteps[-steps:]),
        start=1.0 if full_steps == steps else sigmas[-steps],
    )


def given_sigmas(sigmas: Sequence[float], *, source: str = "the SIGMAS") -> Schedule:
    """Return the schedule of explicit sigmas, as ComfyUI runs a flow model with them.

    The model is told 1000 * sigma, not rounded, at each but the last. source: who gave them.

    Empty for none at all, or for 0 alone, as of a split at the end (no steps: the latent stays as it is). Below 1 the
    run starts from the given latent, and above 0 it ends with noise left in. Raises ConfigError.
    """
    try:
        numbers = tuple(map(float, sigmas))
    except TypeError as error:
        raise ConfigError(
            f"{source} are no list of numbers: {error}; use a node or a scheduler that makes one"
        ) from error
    if numbers in ((), (0.0,)):
        return Schedule(sigmas=(), timesteps=(), start=0.0)
    points = validate_sigmas(numbers, source=source)
    timesteps = tuple(sigma * TRAIN_TIMESTEPS for sigma in points[:-1])
    return Schedule(sigmas=points, timesteps=timesteps, start=points[0])


def cut_schedule(schedule: Schedule, *, start: int, end: int, leftover_noise: bool) -> Schedule:
    """Steps `start` to `end`, without the latter, of a schedule, as ComfyUI's KSampler cuts one.

    leftover_noise: where `end` comes before the last step, end at its sigma; otherwise at 0 instead of it.

    Empty where no step is left. Raises ConfigError, also for an end at sigma 1, where there is nothing but noise.
    """
    if start < 0 or end < 0:
        raise ConfigError(
            f"start_at_step is {start} and end_at_step {end}; they count steps from 0 on"
        )
    points = schedule.sigmas[start : end + 1]
    if len(points) < 2:
        return Schedule(sigmas=(), timesteps=(), start=0.0)
    if end < len(schedule.timesteps) and not leftover_noise:
        points = (*points[:-1], 0.0)
    return Schedule(
        sigmas=validate_sigmas(points, source=f"the sigmas from step {start} to {end}"),
        timesteps=schedule.timesteps[start:end],
        start=points[0] if start else schedule.start,
    )


def validate_sigmas(sigmas: Sequence[float], *, source: str = "the SIGMAS") -> tuple[float, ...]:
    """Return `sigmas` as floats.

    Raises ConfigError unless 1 + SLACK >= s_0 >= s_1 >= ... >= s_N >= 0, s_{N-1} > 0, s_N < 1 and 1 <= N <= MAX_STEPS.
    """
    points = tuple(map(float, sigmas))
    if not 2 <= len(points) <= MAX_STEPS + 1:
        raise ConfigError(
            f"{source} hold {len(points)} value{'s' * (len(points) != 1)}; a run needs 2 to {MAX_STEPS + 1} of them, "
            "one more than steps"
        )
    for index, (sigma, before) in enumerate(zip(points, (1 + SLACK, *points), strict=False)):
        is_last = index == len(points) - 1
        if not (0 <= sigma <= before and (sigma < 1 if is_last else sigma > 0)):  # nor NaN
            raise ConfigError(
                f"value {index} of {source} is {sigma}{f' after {before}' if index else ''}; for Wan they must fall "
                "from 1 or less to 0, such as 1, 0.75, 0.5, 0: use fewer steps, or a scheduler made for flow models"
            )
    return points
