"""Solvers: from x and the clean prediction at one sigma to x at the next. One table says which there are.

Covered: ComfyUI's `euler`, `lcm`, `uni_pc` and `uni_pc_bh2` as they act on flow models
(x = (1 - sigma) * clean + sigma * noise), and `wan_unipc`, the solver of the official Wan2.2 code.
One network evaluation per step. Every operation is elementwise, so a solver works on any shard of
any shape and needs no process group. Who offers, prepares or runs a solver reads SOLVERS: one more
is a line there and what it builds.
Not covered: guidance, masks, timesteps and the loop itself (the workers), schedules (schedules.py).

Source: ComfyUI 0.3.75, comfy/k_diffusion/sampling.py. Behaviour only; the tests compare numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..ipc.errors import ConfigError
from .schedules import validate_sigmas
from .unipc import COMFY_LAST_SIGMA, comfy_unipc, wan_unipc

Sigmas = tuple[float, ...]
StepNoise = Callable[[int], Tensor]
"""Fresh standard noise shaped like x for the step of this index."""


class Solver(Protocol):
    """One run of one solver; steps are taken in the order 0, 1, ..., N - 1."""

    def step(self, index: int, x: Tensor, denoised: Tensor) -> Tensor:
        """Return x at sigmas[index + 1].

        x: fp32, any shape and shard; what the previous step returned (the noised latent at
        index 0), without the clean frames of a mask blended in.
        denoised: same shape; the clean prediction at sigmas[index], masks blended in.
        Both may be kept for later steps or returned as they are: do not write into them.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Euler:
    """x + (s_next - s) * (x - denoised) / s."""

    _sigmas: Sigmas

    def step(self, index: int, x: Tensor, denoised: Tensor) -> Tensor:
        sigma, sigma_next = self._sigmas[index], self._sigmas[index + 1]
        if sigma_next == 0:
            return denoised  # the formula without its rounding
        return torch.add(x, x - denoised, alpha=(sigma_next - sigma) / sigma)


@dataclass(frozen=True, slots=True)
class _Lcm:
    """The clean prediction, noised anew to the next sigma."""

    _sigmas: Sigmas
    _step_noise: StepNoise | None

    def step(self, index: int, x: Tensor, denoised: Tensor) -> Tensor:
        sigma_next = self._sigmas[index + 1]
        if sigma_next == 0:
            return denoised
        assert self._step_noise is not None, "build_solver refuses lcm without noise"
        return torch.add(denoised * (1 - sigma_next), self._step_noise(index), alpha=sigma_next)


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverKind:
    """A solver as users choose it.

    stock: what ComfyUI's KSampler is asked for to get this solver's sigmas: the solver itself if it
    is ComfyUI's, otherwise one that takes all sigmas.
    build: gets validated sigmas, and noise if any was given.
    needs_noise: adds noise after each step whose next sigma is not 0.
    last_sigma: what ComfyUI's code around the solver writes over a last sigma of 0.
    """

    name: str
    stock: str
    build: Callable[[Sigmas, StepNoise | None], Solver]
    needs_noise: bool = False
    last_sigma: float = 0.0


SOLVERS = (
    SolverKind(
        name="uni_pc",
        stock="uni_pc",
        build=lambda sigmas, noise: comfy_unipc(sigmas, bh2=False),
        last_sigma=COMFY_LAST_SIGMA,
    ),
    SolverKind(
        name="uni_pc_bh2",
        stock="uni_pc_bh2",
        build=lambda sigmas, noise: comfy_unipc(sigmas, bh2=True),
        last_sigma=COMFY_LAST_SIGMA,
    ),
    SolverKind(name="euler", stock="euler", build=lambda sigmas, noise: _Euler(sigmas)),
    SolverKind(name="lcm", stock="lcm", build=_Lcm, needs_noise=True),
    SolverKind(name="wan_unipc", stock="euler", build=lambda sigmas, noise: wan_unipc(sigmas)),
)
"""All solvers, in the order in which the sampler node offers them."""


def solver_names() -> tuple[str, ...]:
    return tuple(kind.name for kind in SOLVERS)


def find_solver(name: str) -> SolverKind:
    """The solver `name`. Raises ConfigError for an unknown one."""
    for kind in SOLVERS:
        if kind.name == name:
            return kind
    raise ConfigError(f"sampler {name!r} is not offered; choose {', '.join(solver_names())}")


def build_solver(name: str, *, sigmas: Sequence[float], step_noise: StepNoise | None) -> Solver:
    """Build the solver `name` for one run over `sigmas`.

    sigmas: N + 1 values as `validate_sigmas` wants them.
    step_noise: asked only by a solver that needs noise, once for each step whose next sigma is not
    0, in order.
    Raises ConfigError for an unknown name, for sigmas that the solver cannot follow, or for noise
    that it needs and does not get.
    """
    points = validate_sigmas(sigmas)
    kind = find_solver(name)
    if kind.needs_noise and step_noise is None and (len(points) > 2 or points[-1] > 0):
        raise ConfigError(
            f"Solver {name} adds noise after each of its {len(points) - 1} steps but was given "
            "none; pass step_noise."
        )
    return kind.build(points, step_noise)


def last_sigma(name: str, sigmas: Sequence[float]) -> float:
    """Return the last sigma that ComfyUI's code around the solver `name` sees after the run.

    It differs from the given one where ComfyUI overwrites a last 0. As ComfyUI does for every
    solver, the caller divides the run's result by (1 - last_sigma(...)).
    """
    return sigmas[-1] or find_solver(name).last_sigma
