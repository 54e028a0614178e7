"""A sampling request on one rank: prepared locally, then run together. Forwards, a solver, kept frames, a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import COND, UNCOND, SampleRequest, TensorRef
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.solvers.table import Solver, build_solver, effective_sigmas
from workers.model.wan import WanModel
from workers.parallel.groups import MeshGroups

from .denoise import KeptTokens, StepObserver, denoise
from .forward import (
    Forward,
    ForwardInputs,
    PromptTensors,
    RankInputs,
    build_forward,
    prepare_forward,
    validate_latent,
)


@dataclass(frozen=True, kw_only=True)
class SampleRun:
    """A sampling request cut for this rank. x, kept and the solver's noise are token shards in float32.

    final_scale: what the result is multiplied by, as ComfyUI does.
    """

    inputs: RankInputs
    x: Tensor
    kept: KeptTokens | None
    solver: Solver
    final_scale: float


def prepare_sample(
    request: SampleRequest,
    shape: WanShape,
    *,
    tensor: Callable[[TensorRef], Tensor],
    groups: MeshGroups,
    device: torch.device,
) -> SampleRun:
    """Validate the request and cut its tensors for this rank. No collectives. Raises ConfigError, MeshError."""
    noisy = tensor(request.noisy)
    validate_latent(noisy, shape)
    validate_steps(request, noisy)
    inputs = prepare_forward(forward_inputs(request, tensor), shape, groups, device)

    def step_noise(index: int) -> Tensor:
        assert request.step_noise is not None
        return inputs.shard(tensor(request.step_noise)[index])

    kept = None
    if request.mask is not None and request.clean is not None:
        kept = KeptTokens(
            clean=inputs.shard(tensor(request.clean)), mask=inputs.shard(tensor(request.mask))
        )
    return SampleRun(
        inputs=inputs,
        x=inputs.shard(noisy),
        kept=kept,
        solver=build_solver(
            request.solver,
            sigmas=request.sigmas,
            step_noise=step_noise if request.step_noise is not None else None,
        ),
        final_scale=1 / (1 - effective_sigmas(request.solver, request.sigmas)[-1]),
    )


def forward_inputs(request: SampleRequest, tensor: Callable[[TensorRef], Tensor]) -> ForwardInputs:
    """The request's tensors that its forwards are given."""

    def prompt(text: TensorRef, branch: str) -> PromptTensors:
        return PromptTensors(
            text=tensor(text),
            conditions={
                each.name: tensor(each.tensor)
                for each in request.conditions
                if each.branch == branch
            },
        )

    return ForwardInputs(
        latent=tensor(request.noisy),
        cond=prompt(request.cond, COND),
        uncond=None if request.uncond is None else prompt(request.uncond, UNCOND),
        frame_mask=None if request.frame_mask is None else tensor(request.frame_mask),
    )


def run_sample(
    run: SampleRun,
    request: SampleRequest,
    model: WanModel,
    *,
    observers: Sequence[StepObserver],
    switch: Callable[[], WanModel],
) -> Tensor:
    """Denoise together with the other ranks; returns the whole latent [B, C, T, h, w] float32 on every rank.

    switch() makes the request's low-noise expert ready, when it is its turn; `model` is not needed any more then.
    """

    def forward(model: WanModel, guidance: float) -> Forward:
        scale = None if request.uncond is None else guidance
        return build_forward(model, run.inputs, guidance=scale)

    current = forward(model, request.guidance)

    def forward_at(index: int) -> Forward:
        nonlocal current
        low = request.low_noise
        if low is not None and index == low.from_step:
            current = forward(switch(), low.guidance)
        return current

    x = denoise(
        run.x,
        forward_at=forward_at,
        sigmas=request.sigmas,
        timesteps=request.timesteps,
        solver=run.solver,
        kept=run.kept,
        observers=observers,
    )
    return run.inputs.gather(x) * run.final_scale


def validate_steps(request: SampleRequest, noisy: Tensor) -> None:
    """Refuse timesteps and noise that do not go with the sigmas."""
    if len(request.timesteps) != len(request.sigmas) - 1:
        raise ConfigError(
            f"{len(request.timesteps)} timesteps were given for {len(request.sigmas)} sigmas; "
            "there must be one timestep for each sigma but the last"
        )
    low = request.low_noise
    if low is not None and not 0 < low.from_step < len(request.timesteps):
        raise ConfigError(
            f"the low-noise expert is to begin with step {low.from_step} of {len(request.timesteps)}; "
            f"it must be from 1 to {len(request.timesteps) - 1}: name one model where one does all steps"
        )
    renoised = sum(sigma > 0 for sigma in request.sigmas[1:])
    if request.step_noise is not None and request.step_noise.shape != (renoised, *noisy.shape):
        raise ConfigError(
            f"the noise of the steps has shape {list(request.step_noise.shape)}; these sigmas and this latent need "
            f"{[renoised, *noisy.shape]}"
        )
