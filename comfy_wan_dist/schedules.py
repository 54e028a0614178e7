"""Sigmas and model timesteps of a run, as the sampler nodes put them into a job.

Covered: the official Wan schedule, and the timesteps that go with sigmas from ComfyUI.
Not covered: ComfyUI's own schedulers (comfy_adapter.py asks ComfyUI) and solvers (the workers).

Source: Wan2.2, wan/utils/fm_solvers_unipc.py (set_timesteps); ComfyUI 0.3.75, comfy/samplers.py
(KSampler.set_steps) for the meaning of `denoise`. Formulas only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .ipc.errors import ConfigError

# Timesteps of the training schedule: the model is given t = 1000 * sigma.
TRAIN_TIMESTEPS = 1000

# 1 - 1/1000 after the official code has stored it as float32. The tail decides on which side of an
# integer some timesteps lie before they are truncated.
_OFFICIAL_FIRST_SIGMA = 0.9990000128746033


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The points of a run.

    sigmas: N + 1 noise levels in [0, 1], falling; the last is where the run ends.
    timesteps: N values in [0, 1000], what the model is told at sigmas[0 ... N-1].
    start: share of noise in the latent that the run begins with, [0, 1].
    """

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]
    start: float


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


def flow_timesteps(sigmas: Sequence[float]) -> tuple[float, ...]:
    """Return what ComfyUI tells a flow model at each of N + 1 sigmas but the last.

    N values in [0, 1000]: 1000 * sigma, not rounded.
    """
    return tuple(float(sigma) * TRAIN_TIMESTEPS for sigma in sigmas[:-1])
