"""A sampling request on one rank, from the model that it names to the latent in ComfyUI's memory.

It is prepared locally, voted on, then run together: forwards, a solver, kept frames, a schedule, a switch of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import COND, UNCOND, SampleRequest, TensorRef
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.workload import Workload, requested_workload
from comfy_wan_dist.solvers.table import Solver, build_solver, last_sigma

from .job import Job, groups_for, read_conditions, stop_if_asked, together
from .model.wan import WanModel
from .parallel.groups import MeshGroups
from .resident.transformers import TransformerWork, WantedModels
from .sampling.denoise import KeptTokens, StepObserver, denoise
from .sampling.forward import (
    Forward,
    ForwardInputs,
    PromptTensors,
    RankInputs,
    build_forward,
    prepare_forward,
    validate_latent,
)


def sample(request: SampleRequest, job: Job, work: TransformerWork) -> None:
    """Carry out `request` together with the plane's other ranks. Collectives: votes, and those of the run."""
    transformers, device = work.transformers, work.device
    groups = groups_for(request, work.plane)

    def workload(shape: WanShape) -> Workload:
        validate_latent(request.noisy.shape, shape)
        return requested_workload(request, shape)

    wanted = WantedModels(
        model=request.model,
        low_noise=None if request.low_noise is None else request.low_noise.model,
        workload=workload,
    )
    loaded, take_turns = transformers.have(wanted, groups, job)
    shape = loaded.model.shape
    run = together(
        job,
        lambda: prepare_sample(request, shape, tensor=job.tensor, groups=groups, device=device),
    )
    transformers.let_idle_go(wanted, shape, groups, job)
    loaded.fit_to(run.inputs.shards, groups)

    def switch() -> WanModel:
        low = transformers.switch_to_low_noise(take_turns=take_turns, job=job)
        low.fit_to(run.inputs.shards, groups)
        return low.model

    steps = len(request.timesteps)
    report = StepReport(job=job, steps=steps)
    latent = run_sample(run, request, loaded.model, observers=(report,), switch=switch)

    def write_result() -> None:
        if not bool(torch.isfinite(latent).all()):
            raise ConfigError(
                "the model produced NaN or infinite values; use the dtype bfloat16 or float32, "
                "or check that the checkpoint is whole"
            )
        if groups.rank == 0:
            job.tensor(request.result).copy_(latent)

    together(job, write_result)
    job.report("sample", steps, steps)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """An observer that says how far the run is, and stops it once any rank has been told to stop."""

    job: Job
    steps: int

    def before_step(self, index: int) -> None:
        """Collectives: one vote."""
        if index:
            self.job.report("sample", index, self.steps)
        stop_if_asked(self.job)

    def after_step(self, index: int, x: Tensor, denoised: Tensor) -> None:
        pass


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
    validate_steps(request, noisy)
    inputs = prepare_forward(forward_inputs(request, tensor), shape, groups, device)

    def step_noise(index: int) -> Tensor:
        assert request.step_noise is not None
        return inputs.shard(tensor(request.step_noise)[index])

    x, kept = inputs.shard(noisy), None
    if request.mask is not None and request.clean is not None:
        clean = inputs.shard(tensor(request.clean))
        noise = None if shape.has_frame_times else clean + (x - clean) / request.start
        kept = KeptTokens(clean=clean, mask=inputs.shard(tensor(request.mask)), noise=noise)
    return SampleRun(
        inputs=inputs,
        x=x,
        kept=kept,
        solver=build_solver(
            request.solver,
            sigmas=request.sigmas,
            step_noise=step_noise if request.step_noise is not None else None,
        ),
        final_scale=1 / (1 - last_sigma(request.solver, request.sigmas)),
    )


def forward_inputs(request: SampleRequest, tensor: Callable[[TensorRef], Tensor]) -> ForwardInputs:
    """The request's tensors that its forwards are given."""
    conditions = read_conditions(request.conditions, tensor)
    return ForwardInputs(
        latent=tensor(request.noisy),
        cond=PromptTensors(text=tensor(request.cond), conditions=conditions[COND]),
        uncond=None
        if request.uncond is None
        else PromptTensors(text=tensor(request.uncond), conditions=conditions[UNCOND]),
        frame_factors=None if request.frame_mask is None else tensor(request.frame_mask),
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
