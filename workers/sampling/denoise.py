"""The denoise loop of one rank. It stays sharded from the first step to the last.

Every rank keeps its token shard of x, of the model's outputs and of the solver's state in float32; per step only the
ranks of cfg exchange their shards. The given frames of an image-to-video run are blended in before each forward and
into each clean prediction. Guidance is combined on all ranks alike, so their solver states stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from comfy_wan_dist.solvers.table import Solver

from .forward import Forward


@dataclass(frozen=True, kw_only=True)
class KeptTokens:
    """Tokens to keep: `clean` counts where `mask` is 0. All [B, L, P] float32 shards.

    noise: of a model with one timestep for all frames, which is given them as noisy as the others.
    """

    clean: Tensor
    mask: Tensor
    noise: Tensor | None = None

    def blend(self, x: Tensor, sigma: float = 0.0) -> Tensor:
        """x with what is kept at this sigma."""
        kept = self.clean if self.noise is None else torch.lerp(self.clean, self.noise, sigma)
        return torch.lerp(kept, x, self.mask)


class StepObserver(Protocol):
    """Watches the steps of a run, on every rank alike. What it raises ends the run."""

    def before_step(self, index: int) -> None:
        """Step `index` is about to be computed."""
        ...

    def after_step(self, index: int, x: Tensor, denoised: Tensor) -> None:
        """Step `index` has its prediction: `denoised`, the clean x of this step's `x`; shards not to be written to."""
        ...


def denoise(
    x: Tensor,
    *,
    forward_at: Callable[[int], Forward],
    sigmas: tuple[float, ...],
    timesteps: tuple[float, ...],
    solver: Solver,
    kept: KeptTokens | None = None,
    observers: Sequence[StepObserver] = (),
) -> Tensor:
    """Carry the token shard x [B, L, P] float32 from sigmas[0] to sigmas[-1].

    forward_at(index) says who predicts in a step, after the observers have heard of it.
    Collectives: those of the forwards.
    """
    for index, timestep in enumerate(timesteps):
        for observer in observers:
            observer.before_step(index)
        model_x = x if kept is None else kept.blend(x, sigmas[index])
        velocity = forward_at(index).predict(model_x, timestep)
        denoised = torch.sub(model_x, velocity, alpha=sigmas[index])
        if kept is not None:
            denoised = kept.blend(denoised)
        for observer in observers:
            observer.after_step(index, model_x, denoised)
        x = solver.step(index, x, denoised)
    return x
