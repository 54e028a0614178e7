"""UniPC, a multistep predictor-corrector: ComfyUI's and that of the official Wan2.2 code.

They differ in more than their order:

    kind            lambda             order   last sigma 0         first sigma 1
    uni_pc[_bh2]    -ln s              3       becomes 0.001        as any other
    wan_unipc       ln((1 - s) / s)    2       x = last prediction  lambda = -inf: first order

Both correct x when a step begins: the network sees the predicted x_i, and the prediction m_i that
it gives improves x_i before x_{i+1} is predicted from it. m_i is not evaluated anew.

Precision: weights are worked out when a run begins, in float64 but for what ComfyUI's UniPC loses
in float32 and a like result must lose too; tensors are meant to be float32.

Sources: Zhao et al., "UniPC" (2023), equations of the data prediction form; ComfyUI 0.3.75,
comfy/extra_samplers/uni_pc.py; Wan2.2, wan/utils/fm_solvers_unipc.py. Behaviour only; the tests
compare numbers with ComfyUI's functions and with diffusers' UniPC, which does what that of Wan2.2
does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ipc.errors import ConfigError

COMFY_LAST_SIGMA = 0.001
"""ComfyUI writes this value over a last sigma of 0 before it runs its UniPC."""
# ComfyUI then passes sigmas through sqrt(1 - exp(-log(1 + s^2))) in float32, where 1 + 0.001^2 is
# 1 + 2^-20: what its solver really ends at is 2^-10. With 0.001 the results differ by 1e-4.
_COMFY_LAST_SOLVER_SIGMA = 2.0**-10
# ComfyUI works its UniPC's weights out in this type, and their last moments cancel to nothing but
# rounding where steps are close: at 20 steps and shift 8 exact weights lead 1e-3 away from it.
# (A GPU may round some of the operations otherwise than the CPU, which is what is followed here.)
_COMFY_DTYPE = torch.float32


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


class UniPC:
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


def comfy_unipc(sigmas: tuple[float, ...], *, bh2: bool) -> UniPC:
    """ComfyUI's UniPC: variance exploding, order 3. Raises ConfigError for sigmas it cannot tell apart."""
    steps = len(sigmas) - 1
    if sigmas[-1] == 0:
        if sigmas[-2] <= COMFY_LAST_SIGMA:
            raise ConfigError(
                f"ComfyUI's uni_pc ends at sigma {COMFY_LAST_SIGMA} instead of 0, but the "
                f"sigma before it is {sigmas[-2]}, which must be larger; use fewer steps, another "
                "scheduler or another solver."
            )
        sigmas = (*sigmas[:-1], _COMFY_LAST_SOLVER_SIGMA)
    if steps == 1:
        # ComfyUI's order is then 0: it evaluates the network once, never uses the answer, and
        # hands back x after a change of variables at one sigma and its inverse at the other.
        scale = math.sqrt((1 + sigmas[1] ** 2) / (1 + sigmas[0] ** 2))
        return UniPC((_Row(corrector=(), predictor=(scale,), keep=0),))
    return UniPC(
        _rows(
            sigmas=sigmas,
            lambdas=_comfy_lambdas(sigmas),
            alphas=(1.0,) * len(sigmas),
            max_order=3,
            bh2=bh2,
            rounding=_COMFY_DTYPE,
        )
    )


def _comfy_lambdas(sigmas: tuple[float, ...]) -> tuple[float, ...]:
    """-ln s by ComfyUI's detour: log(alpha / sqrt(1 - alpha^2)), where alpha = 1 / sqrt(1 + s^2)."""
    points = torch.tensor(sigmas, dtype=_COMFY_DTYPE, device="cpu")
    log_alpha = 0.5 * torch.log(1 / (points * points + 1))
    log_std = 0.5 * torch.log(1 - torch.exp(2 * log_alpha))
    lambdas: list[float] = (log_alpha - log_std).tolist()
    return tuple(lambdas)


def wan_unipc(sigmas: tuple[float, ...]) -> UniPC:
    """The official code's UniPC: rectified flow, order 2, bh2. Raises ConfigError as `comfy_unipc` does."""
    return UniPC(
        _rows(
            sigmas=sigmas,
            lambdas=tuple(_flow_lambda(sigma) for sigma in sigmas),
            alphas=tuple(1 - sigma for sigma in sigmas),
            max_order=2,
            bh2=True,
            rounding=None,
        )
    )


def _flow_lambda(sigma: float) -> float:
    """Half the log signal-to-noise ratio of a flow model, infinite at both ends."""
    if sigma == 0:
        return math.inf
    if sigma == 1:
        return -math.inf
    return math.log((1 - sigma) / sigma)


def _rows(
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
