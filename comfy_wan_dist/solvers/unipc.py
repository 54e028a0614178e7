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
            dtype=_COMFY_DTYPE,
        )
    )


def _comfy_lambdas(sigmas: tuple[float, ...]) -> tuple[float, ...]:
    """-ln s by ComfyUI's detour: log(alpha / sqrt(1 - alpha^2)), where alpha = 1 / sqrt(1 + s^2)."""
    points = torch.tensor(sigmas, dtype=_COMFY_DTYPE, device="cpu")
    log_alpha = 0.5 * torch.log(1 / (points * points + 1))
    log_std = 0.5 * torch.log(1 - torch.exp(2 * log_alpha))
    return tuple((log_alpha - log_std).tolist())


def wan_unipc(sigmas: tuple[float, ...]) -> UniPC:
    """The official code's UniPC: rectified flow, order 2, bh2. Raises ConfigError as `comfy_unipc` does."""
    points = torch.tensor(sigmas, dtype=torch.float64, device="cpu")
    return UniPC(
        _rows(
            sigmas=sigmas,
            lambdas=tuple((-torch.logit(points.clamp(max=1))).tolist()),  # infinite at 0 and 1
            alphas=tuple(1 - sigma for sigma in sigmas),
            max_order=2,
            bh2=True,
            dtype=torch.float64,
        )
    )


def _rows(
    *,
    sigmas: tuple[float, ...],
    lambdas: tuple[float, ...],
    alphas: tuple[float, ...],
    max_order: int,
    bh2: bool,
    dtype: torch.dtype,
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
        last = lambdas[target - 1]
        h = lambdas[target] - last
        if not h > 0:  # nor NaN, between two infinite ones
            raise ConfigError(
                f"UniPC cannot tell sigma {target - 1} ({sigmas[target - 1]}) from the next one in float32; "
                "use fewer steps, another scheduler, or the sampler euler"
            )
        nodes = tuple((lambdas[target - 1 - back] - last) / h for back in range(1, order))
        ratio = sigmas[target] / sigmas[target - 1]
        update = _Update(h=h, alpha=alphas[target], bh2=bh2, dtype=dtype)
        predictors.append((ratio, *update.weights(nodes)))
        if target < steps:  # the network never sees the last point, so nothing can correct it
            # b itself is a node here: the network has been evaluated there by now.
            m_a, m_b, *others = update.weights((1.0, *nodes))
            correctors.append((ratio, m_b, m_a, *others))
    # Both rows begin with x and with the prediction of their own step.
    reads = [max(map(len, rows)) - 2 for rows in zip(correctors, predictors, strict=True)]
    return tuple(
        _Row(corrector=corrector, predictor=predictor, keep=keep)
        for corrector, predictor, keep in zip(correctors, predictors, [*reads[1:], 0], strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    """One update between neighbouring points a and b.

    h: lambda_b - lambda_a; may be infinite when no more than one node takes part.
    alpha: the factor of the clean signal at b.
    bh2: B(h) is exp(-h) - 1; otherwise (bh1) it is -h.
    dtype: what moments are worked out in, step by step.
    """

    h: float
    alpha: float
    bh2: bool
    dtype: torch.dtype

    def weights(self, nodes: tuple[float, ...]) -> tuple[float, ...]:
        """Return the weights of m_a and of each node's m in x_b.

        nodes: (lambda - lambda_a) / h of the points beside a that take part, newest first.
        x_b is sigma_b / sigma_a * x_a - alpha * (exp(-h) - 1) * m_a
        - alpha * B * sum(rho_k * (m_k - m_a) / node_k).
        """
        # One node: the references take 1/2 (right to the order that counts) rather than solve.
        rhos = self._solve_moments(nodes) if len(nodes) > 1 else [0.5] * len(nodes)
        b_h = math.expm1(-self.h) if self.bh2 else -self.h
        differences = [
            -self.alpha * b_h * rho / node for rho, node in zip(rhos, nodes, strict=True)
        ]
        return (-self.alpha * math.expm1(-self.h) - sum(differences), *differences)

    def _solve_moments(self, nodes: tuple[float, ...]) -> list[float]:
        """Solve sum(rho_k * node_k^j) = moment_j, j = 0 ... len(nodes) - 1 (2 or 3 unknowns).

        moment_j is (j + 1)! * z * phi_{j+2}(z) / B with z = -h, by the recurrence of phi, which cancels.
        """
        z = torch.tensor(-self.h, dtype=self.dtype, device="cpu")
        b_h = torch.expm1(z) if self.bh2 else z
        z_phi = torch.expm1(z) / z - 1
        moments = []
        for j in range(len(nodes)):
            moments.append((z_phi * math.factorial(j + 1) / b_h).item())
            z_phi = z_phi / z - 1 / math.factorial(j + 2)
        points = torch.tensor(nodes, dtype=torch.float64, device="cpu")
        sums = torch.tensor(moments, dtype=torch.float64, device="cpu")
        rhos: list[float] = torch.linalg.solve(torch.linalg.vander(points).T, sums).tolist()
        return rhos
