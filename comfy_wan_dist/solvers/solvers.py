"""Solvers: from x and the clean prediction at one sigma to x at the next.

Covered: ComfyUI's `euler`, `lcm`, `uni_pc` and `uni_pc_bh2` as they act on flow models
(x = (1 - sigma) * clean + sigma * noise), and `wan_unipc`, the solver of the official Wan2.2 code.
One network evaluation per step. Every operation is elementwise, so a solver works on any shard of
any shape and needs no process group.
Not covered: guidance, masks, timesteps and the loop itself (denoise.py), schedules (the node side).

Precision: weights are worked out when a solver is built, in float64 but for what ComfyUI's UniPC
loses in float32 and a like result must lose too; tensors are meant to be fp32.

Sources: Zhao et al., "UniPC" (2023), equations of the data prediction form; ComfyUI 0.3.75,
comfy/extra_samplers/uni_pc.py and comfy/k_diffusion/sampling.py; Wan2.2,
wan/utils/fm_solvers_unipc.py. Behaviour only; the tests compare numbers with ComfyUI's functions
and with diffusers' UniPC, which does what that of Wan2.2 does.

The two UniPC kinds differ in more than their order:

    kind            lambda             order   last sigma 0         first sigma 1
    uni_pc[_bh2]    -ln s              3       becomes 0.001        as any other
    wan_unipc       ln((1 - s) / s)    2       x = last prediction  lambda = -inf: first order

Both correct x when a step begins: the network sees the predicted x_i, and the prediction m_i that
it gives improves x_i before x_{i+1} is predicted from it. m_i is not evaluated anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..ipc.errors import ConfigError

SOLVERS: tuple[str, ...] = ("euler", "uni_pc", "uni_pc_bh2", "wan_unipc", "lcm")

_COMFY_UNIPC = ("uni_pc", "uni_pc_bh2")

# ComfyUI writes this value over a last sigma of 0 before it runs its UniPC.
_COMFY_UNIPC_LAST_SIGMA = 0.001
# ComfyUI then passes sigmas through sqrt(1 - exp(-log(1 + s^2))) in float32, where 1 + 0.001^2 is
# 1 + 2^-20: what its solver really ends at is 2^-10. With 0.001 the results differ by 1e-4.
_COMFY_UNIPC_LAST_SOLVER_SIGMA = 2.0**-10
# ComfyUI works its UniPC's weights out in this type, and their last moments cancel to nothing but
# rounding where steps are close: at 20 steps and shift 8 exact weights lead 1e-3 away from it.
# (A GPU may round some of the operations otherwise than the CPU, which is what is followed here.)
_COMFY_UNIPC_DTYPE = torch.float32


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


def build_solver(
    name: str, *, sigmas: Sequence[float], step_noise: Callable[[int], Tensor] | None
) -> Solver:
    """Build the solver `name` for one run over `sigmas`.

    sigmas: N + 1 values in [0, 1], strictly decreasing; only the last may be 0.
    step_noise: step_noise(index) returns fresh standard noise shaped like x. Only `lcm` asks for
    it, once for each step whose next sigma is not 0, in order.
    Raises ConfigError for an unknown name, for sigmas that no solver can follow, or when `lcm`
    has no noise.
    """
    points = validate_sigmas(sigmas)
    if name == "euler":
        return _Euler(points)
    if name == "lcm":
        if step_noise is None and (len(points) > 2 or points[-1] > 0):
            raise ConfigError(
                f"Solver lcm adds noise after each of its {len(points) - 1} steps but was given "
                "none; pass step_noise."
            )
        return _Lcm(points, step_noise)
    if name in _COMFY_UNIPC:
        return _UniPC(_comfy_unipc_rows(points, bh2=name == "uni_pc_bh2"))
    if name == "wan_unipc":
        return _UniPC(_wan_unipc_rows(points))
    raise ConfigError(f"Unknown solver {name!r}; choose one of {', '.join(SOLVERS)}.")


def effective_sigmas(name: str, sigmas: Sequence[float]) -> tuple[float, ...]:
    """Return the sigmas that ComfyUI's code around the solver `name` sees after the run.

    They differ from the given ones where ComfyUI overwrites a last 0. As ComfyUI does for every
    solver, the caller divides the run's result by (1 - effective_sigmas(...)[-1]).
    """
    points = validate_sigmas(sigmas)
    if name in _COMFY_UNIPC and points[-1] == 0:
        return (*points[:-1], _COMFY_UNIPC_LAST_SIGMA)
    return points


def validate_sigmas(sigmas: Sequence[float]) -> tuple[float, ...]:
    """Return `sigmas` as floats.

    Raises ConfigError unless 1 >= s_0 > s_1 > ... > s_N >= 0 and N >= 1.
    """
    points = tuple(float(sigma) for sigma in sigmas)
    if len(points) < 2:
        raise ConfigError(
            f"A run needs at least 2 sigmas (1 step), got {len(points)}; raise the steps or the "
            "denoise value."
        )
    for index, sigma in enumerate(points):
        if not 0 <= sigma <= 1:  # NaN fails this as well
            raise ConfigError(
                f"Sigma {index} is {sigma}, but a flow model's sigmas lie in [0, 1]; "
                "choose another scheduler."
            )
        if index and sigma >= points[index - 1]:
            raise ConfigError(
                f"Sigmas must fall at every step, but sigma {index} is {sigma} after "
                f"{points[index - 1]}; use fewer steps or another scheduler."
            )
    return points


class _Euler:
    """x + (s_next - s) * (x - denoised) / s."""

    __slots__ = ("_sigmas",)

    def __init__(self, sigmas: tuple[float, ...]) -> None:
        self._sigmas = sigmas

    def step(self, index: int, x: Tensor, denoised: Tensor) -> Tensor:
        sigma, sigma_next = self._sigmas[index], self._sigmas[index + 1]
        if sigma_next == 0:
            return denoised  # the formula without its rounding
        return torch.add(x, x - denoised, alpha=(sigma_next - sigma) / sigma)


class _Lcm:
    """The clean prediction, noised anew to the next sigma."""

    __slots__ = ("_sigmas", "_step_noise")

    def __init__(
        self, sigmas: tuple[float, ...], step_noise: Callable[[int], Tensor] | None
    ) -> None:
        self._sigmas = sigmas
        self._step_noise = step_noise

    def step(self, index: int, x: Tensor, denoised: Tensor) -> Tensor:
        sigma_next = self._sigmas[index + 1]
        if sigma_next == 0:
            return denoised
        assert self._step_noise is not None, "build_solver refuses lcm without noise"
        return torch.add(denoised * (1 - sigma_next), self._step_noise(index), alpha=sigma_next)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """Weights of step i. With m the clean predictions, newest first, and x_i, x_{i-1} corrected:

    corrector: weights of (x_{i-1}, m_i, m_{i-1}, ...), whose sum is x_i; empty: x_i is given.
    predictor: weights of (x_i, m_i, m_{i-1}, ...), whose sum is x_{i+1}.
    keep: how many of (m_i, m_{i-1}, ...) the next step reads.
    """

    corrector: tuple[float, ...]
    predictor: tuple[float, ...]
    keep: int


class _UniPC:
    """A multistep predictor-corrector, given by one row of weights per step.

    State: the last corrected x, and at most three clean predictions.
    """

    __slots__ = ("_denoised", "_next_index", "_rows", "_x")

    def __init__(self, rows: tuple[_Row, ...]) -> None:
        self._rows = rows
        self._next_index = 0
        self._x: Tensor | None = None
        self._denoised: tuple[Tensor, ...] = ()

    def step(self, index: int, x: Tensor, denoised: Tensor) -> Tensor:
        if index != self._next_index or index >= len(self._rows):
            raise ValueError(
                f"step {index} was asked for, but step {self._next_index} of {len(self._rows)} is "
                "next; a multistep solver runs once and in order"
            )
        row = self._rows[index]
        predictions = (denoised, *self._denoised)
        if row.corrector:
            assert self._x is not None, "only the first step has no x before it"
            x = _weighted_sum(row.corrector, (self._x, *predictions))
        self._next_index = index + 1
        self._x = x if row.keep else None
        self._denoised = predictions[: row.keep]
        return _weighted_sum(row.predictor, (x, *predictions))


def _weighted_sum(weights: tuple[float, ...], tensors: tuple[Tensor, ...]) -> Tensor:
    """Sum the first len(weights) of `tensors`, each times its weight.

    A tensor of weight 0 is not read; one that alone counts, with weight 1, is returned itself.
    """
    total: Tensor | None = None
    for weight, tensor in zip(weights, tensors, strict=False):
        if weight == 0:
            continue
        if total is None:
            total = tensor if weight == 1 else tensor * weight
        else:
            total = torch.add(total, tensor, alpha=weight)
    assert total is not None, "some weight is always non-zero"
    return total


def _comfy_unipc_rows(sigmas: tuple[float, ...], *, bh2: bool) -> tuple[_Row, ...]:
    """Weights of ComfyUI's UniPC: variance exploding, order 3."""
    steps = len(sigmas) - 1
    if sigmas[-1] == 0:
        if sigmas[-2] <= _COMFY_UNIPC_LAST_SIGMA:
            raise ConfigError(
                f"ComfyUI's uni_pc ends at sigma {_COMFY_UNIPC_LAST_SIGMA} instead of 0, but the "
                f"sigma before it is {sigmas[-2]}, which must be larger; use fewer steps, another "
                "scheduler or another solver."
            )
        sigmas = (*sigmas[:-1], _COMFY_UNIPC_LAST_SOLVER_SIGMA)
    if steps == 1:
        # ComfyUI's order is then 0: it evaluates the network once, never uses the answer, and
        # hands back x after a change of variables at one sigma and its inverse at the other.
        scale = math.sqrt((1 + sigmas[1] ** 2) / (1 + sigmas[0] ** 2))
        return (_Row(corrector=(), predictor=(scale,), keep=0),)
    return _unipc_rows(
        sigmas=sigmas,
        lambdas=_comfy_unipc_lambdas(sigmas),
        alphas=(1.0,) * len(sigmas),
        max_order=3,
        bh2=bh2,
        rounding=_COMFY_UNIPC_DTYPE,
    )


def _comfy_unipc_lambdas(sigmas: tuple[float, ...]) -> tuple[float, ...]:
    """-ln s by ComfyUI's detour: log(alpha / sqrt(1 - alpha^2)), where alpha = 1 / sqrt(1 + s^2)."""
    points = torch.tensor(sigmas, dtype=_COMFY_UNIPC_DTYPE, device="cpu")
    log_alpha = 0.5 * torch.log(1 / (points * points + 1))
    log_std = 0.5 * torch.log(1 - torch.exp(2 * log_alpha))
    lambdas: list[float] = (log_alpha - log_std).tolist()
    return tuple(lambdas)


def _wan_unipc_rows(sigmas: tuple[float, ...]) -> tuple[_Row, ...]:
    """Weights of the official UniPC: rectified flow, order 2, bh2."""
    return _unipc_rows(
        sigmas=sigmas,
        lambdas=tuple(_flow_lambda(sigma) for sigma in sigmas),
        alphas=tuple(1 - sigma for sigma in sigmas),
        max_order=2,
        bh2=True,
        rounding=None,
    )


def _flow_lambda(sigma: float) -> float:
    """Half the log signal-to-noise ratio of a flow model, infinite at both ends."""
    if sigma == 0:
        return math.inf
    if sigma == 1:
        return -math.inf
    return math.log((1 - sigma) / sigma)


def _unipc_rows(
    *,
    sigmas: tuple[float, ...],
    lambdas: tuple[float, ...],
    alphas: tuple[float, ...],
    max_order: int,
    bh2: bool,
    rounding: torch.dtype | None,
) -> tuple[_Row, ...]:
    """Return the weights of a whole run; update j leads from point j - 1 to point j."""
    steps = len(sigmas) - 1
    correctors: list[tuple[float, ...]] = [()]
    predictors: list[tuple[float, ...]] = []
    for target in range(1, steps + 1):
        order = min(max_order, target, steps + 1 - target)
        # A point at -inf lies infinitely far back: its difference quotient is 0.
        while order > 1 and math.isinf(lambdas[target - order]):
            order -= 1
        h = lambdas[target] - lambdas[target - 1]
        if h == 0:
            raise ConfigError(
                f"UniPC cannot tell sigma {target - 1} ({sigmas[target - 1]}) from the next one in float32; "
                "use fewer steps, another scheduler, or the sampler euler"
            )
        nodes = tuple(
            (lambdas[target - 1 - back] - lambdas[target - 1]) / h for back in range(1, order)
        )
        update = _Update(
            h=h,
            nodes=nodes,
            ratio=sigmas[target] / sigmas[target - 1],
            alpha=alphas[target],
            bh2=bh2,
            rounding=rounding,
        )
        predictors.append(_predictor_weights(update))
        if target < steps:  # the network never sees the last point, so nothing can correct it
            correctors.append(_corrector_weights(update))
    rows = []
    for index in range(steps):
        keep = 0
        if index + 1 < steps:
            # Both rows begin with x and with the prediction of their own step.
            keep = max(len(correctors[index + 1]), len(predictors[index + 1])) - 2
        rows.append(_Row(corrector=correctors[index], predictor=predictors[index], keep=keep))
    return tuple(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    """One update between neighbouring points a and b.

    h: lambda_b - lambda_a; may be infinite when there are no nodes.
    nodes: (lambda - lambda_a) / h of the points before a that take part, newest first.
    ratio: sigma_b / sigma_a. alpha: the factor of the clean signal at b.
    bh2: B(h) is exp(-h) - 1; otherwise (bh1) it is -h.
    rounding: the type in which moments are worked out step by step; None for exact ones.
    """

    h: float
    nodes: tuple[float, ...]
    ratio: float
    alpha: float
    bh2: bool
    rounding: torch.dtype | None

    @property
    def b_h(self) -> float:
        return math.expm1(-self.h) if self.bh2 else -self.h

    def moments(self, count: int) -> list[float]:
        """Return what sum(rho_k * node_k^j) must be for j = 0 ... count - 1."""
        if self.rounding is not None:
            return self._rounded_moments(count, self.rounding)
        z = -self.h
        return [math.factorial(j + 1) * z * phi(j + 2, z) / self.b_h for j in range(count)]

    def _rounded_moments(self, count: int, dtype: torch.dtype) -> list[float]:
        """`moments` by the recurrence of phi, which cancels, with every result rounded to `dtype`."""
        z = torch.tensor(-self.h, dtype=dtype, device="cpu")
        b_h = torch.expm1(z) if self.bh2 else z
        z_phi = torch.expm1(z) / z - 1
        moments: list[float] = []
        for j in range(count):
            moments.append((z_phi * math.factorial(j + 1) / b_h).item())
            z_phi = z_phi / z - 1 / math.factorial(j + 2)
        return moments


def _predictor_weights(update: _Update) -> tuple[float, ...]:
    """Return the weights of (x_a, m_a, m_before_a, ...), whose sum is x_b."""
    # One node: the references take 1/2 (right to the order that counts) rather than solve.
    rhos = [0.5] if len(update.nodes) == 1 else _solve_moments(update.nodes, update)
    differences = _difference_weights(update, rhos, update.nodes)
    m_a = -update.alpha * math.expm1(-update.h) - sum(differences)
    return (update.ratio, m_a, *differences)


def _corrector_weights(update: _Update) -> tuple[float, ...]:
    """Return the weights of (x_a, m_b, m_a, m_before_a, ...), whose sum is the corrected x_b."""
    nodes = (1.0, *update.nodes)  # b itself, where the network has been evaluated by now
    rhos = [0.5] if len(nodes) == 1 else _solve_moments(nodes, update)
    m_b, *differences = _difference_weights(update, rhos, nodes)
    m_a = -update.alpha * math.expm1(-update.h) - m_b - sum(differences)
    return (update.ratio, m_b, m_a, *differences)


def _difference_weights(
    update: _Update, rhos: Sequence[float], nodes: Sequence[float]
) -> list[float]:
    """Return the weight of each node's m in -alpha * B * sum(rho_k * (m_k - m_a) / node_k)."""
    factor = -update.alpha * update.b_h
    return [factor * rho / node for rho, node in zip(rhos, nodes, strict=True)]


def _solve_moments(nodes: tuple[float, ...], update: _Update) -> list[float]:
    """Solve sum(rho_k * node_k^j) = moment_j, j = 0 ... len(nodes) - 1 (at most 3 unknowns).

    Row reduction of a Vandermonde system, without pivots: nodes differ, so no pivot is 0.
    """
    size = len(nodes)
    rows = [[*(node**j for node in nodes), moment] for j, moment in enumerate(update.moments(size))]
    for column in range(size):
        pivot = rows[column][column]
        rows[column] = [value / pivot for value in rows[column]]
        for other in range(size):
            if other != column:
                factor = rows[other][column]
                rows[other] = [
                    value - factor * above
                    for value, above in zip(rows[other], rows[column], strict=True)
                ]
    return [row[-1] for row in rows]


def phi(k: int, z: float) -> float:
    """Return phi_k(z) = sum over n of z^n / (n + k)!, for k >= 1.

    The same as phi_0 = exp, phi_k = (phi_{k-1} - 1/(k-1)!) / z, which cancels near z = 0.
    """
    if abs(z) < 1:
        return math.fsum(z**n / math.factorial(n + k) for n in range(20))
    value = math.expm1(z) / z
    for j in range(2, k + 1):
        value = (value - 1 / math.factorial(j - 1)) / z
    return value
