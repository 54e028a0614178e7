"""Which expert of a model predicts in which step, and with which guidance.

Wan2.2 A14B is two models of equal shape: one for much noise, one for little. Covered: the step at which the second one
takes over. Not covered: where their weights are meanwhile (the workers).
Source: Wan2.2, wan/text2video.py and wan/configs (boundary): the first model predicts while t >= boundary * 1000.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose

from ..ipc.errors import ConfigError
from ..ipc.messages import LowNoise, ModelSpec
from ..mesh.shape import WanShape
from ..solvers.schedules import TRAIN_TIMESTEPS, Schedule
from .handle import ResolvedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """`first` predicts with `guidance` until `low_noise`, if there is one, takes over."""

    first: ModelSpec
    guidance: float
    low_noise: LowNoise | None = None

    @property
    def is_guided(self) -> bool:
        scales = [self.guidance, *([] if self.low_noise is None else [self.low_noise.guidance])]
        return not all(isclose(scale, 1.0) for scale in scales)

    def describe(self, model: ResolvedModel, steps: int) -> str:
        """What a report says of a model in two experts."""
        high = 0 if self.first == model.low_noise else steps
        if self.low_noise is not None:
            high = self.low_noise.from_step
        return f"steps by the high-noise expert: {high}, by the low-noise expert: {steps - high}"


def default_boundary(shape: WanShape) -> float:
    """Share of the noise below which the second expert predicts: of I2V-A14B, or of T2V-A14B."""
    return 0.9 if shape.image_dim else 0.875


def choose_experts(
    model: ResolvedModel,
    schedule: Schedule,
    *,
    cfg: float,
    low_noise_cfg: float | None = None,
    boundary: float | None = None,
) -> Experts:
    """Who predicts in which step of a schedule that has any.

    low_noise_cfg: the second expert's guidance, by default `cfg`. Raises ConfigError.
    """
    if model.low_noise is None:
        if low_noise_cfg is not None or boundary is not None:
            raise ConfigError(
                "a boundary or low_noise_cfg is set, but the model has one expert; set both to 0, or choose a "
                "low_noise_model in Wan Dist Load Model"
            )
        return Experts(first=model.spec, guidance=cfg)
    if boundary is None:
        boundary = default_boundary(model.shape)
    if not 0 < boundary < 1:
        raise ConfigError(f"boundary is {boundary}; it must be between 0 and 1, such as 0.875")
    if low_noise_cfg is None:
        low_noise_cfg = cfg
    first = sum(timestep >= boundary * TRAIN_TIMESTEPS for timestep in schedule.timesteps)
    if first == 0:
        return Experts(first=model.low_noise, guidance=low_noise_cfg)
    if first == len(schedule.timesteps):
        return Experts(first=model.spec, guidance=cfg)
    low_noise = LowNoise(model=model.low_noise, from_step=first, guidance=low_noise_cfg)
    return Experts(first=model.spec, guidance=cfg, low_noise=low_noise)
