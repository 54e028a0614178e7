"""A sampler node's work: cut along the batch into pieces for the planes, each on the mesh that suits it, and done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..comfyui.conditioning import Conditioning, Prompt, read_prompt
from ..comfyui.latent import (
    Latent,
    SamplingTensors,
    finish_sampling,
    fit_latent,
    prepare_sampling,
)
from ..group.queue import Piece
from ..ipc.errors import ConfigError
from ..ipc.messages import COND, UNCOND, Condition, SampleRequest, TensorRef
from ..ipc.shared import split_ref
from ..mesh.choice import choose_job_mesh, joint_samples, piece_sizes
from ..mesh.degrees import MeshDegrees
from ..mesh.flops import rank_flops
from ..mesh.report import job_text
from ..mesh.workload import requested_workload
from ..solvers.schedules import Schedule
from .experts import Experts, choose_experts
from .handle import ModelHandle, ResolvedModel
from .session import Session, open_session, planes_for, resolve


@dataclass(frozen=True, kw_only=True)
class SamplerInputs:
    """What a sampler node was given, but the schedule, which each makes in its own way.

    add_noise: to the latent, before the first step. low_noise_cfg, boundary: 0 for those of choose_experts.
    """

    model: ModelHandle
    positive: Conditioning
    negative: Conditioning
    latent: Latent
    seed: int
    solver: str
    cfg: float
    low_noise_cfg: float
    boundary: float
    add_noise: bool = True


async def sample_latent(given: SamplerInputs, schedule: Schedule) -> tuple[dict[str, Any], str]:
    """The LATENT that a stock KSampler would return, and the report. Raises ConfigError and what the ranks raise."""
    numbers = {"cfg": given.cfg, "low_noise_cfg": given.low_noise_cfg, "boundary": given.boundary}
    for name, value in numbers.items():
        if not abs(value) <= 1e30:  # NaN, or beyond what ranks compute in
            raise ConfigError(f"{name} is {value}; it must be a number from -1e30 to 1e30")
    model = resolve(given.model)
    latent = fit_latent(given.latent, model.shape)
    if not schedule.timesteps:
        return latent, "no steps: nothing was computed"
    experts = choose_experts(
        model,
        schedule,
        cfg=float(given.cfg),
        low_noise_cfg=float(given.low_noise_cfg) or None,
        boundary=given.boundary or None,
    )
    tensors = prepare_sampling(
        latent,
        model.shape,
        seed=given.seed,
        sampler=given.solver,
        schedule=schedule,
        add_noise=given.add_noise,
    )
    prompt = partial(read_prompt, shape=model.shape, tensors=tensors)
    sampling = Sampling(
        tensors=tensors,
        cond=prompt(given.positive, label="positive"),
        uncond=prompt(given.negative, label="negative") if experts.is_guided else None,
        schedule=schedule,
        solver=given.solver,
        experts=experts,
    )
    result, report = await sample(sampling, model)
    return finish_sampling(latent, result), report


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What the ranks are to do, as the pieces are cut from it. Without uncond there is no guidance.

    experts: who predicts, in turn.
    """

    tensors: SamplingTensors
    cond: Prompt
    uncond: Prompt | None
    schedule: Schedule
    solver: str
    experts: Experts


async def sample(sampling: Sampling, model: ResolvedModel) -> tuple[Tensor, str]:
    """The batch's latent, normalised, and the report. Raises what the ranks raise."""
    planes = planes_for(model)
    with open_session(planes) as session:
        result = session.reserve(sampling.tensors.noisy.shape)
        requests = build_requests(session, sampling, model, planes[0].degrees, result)
        pieces = [build_piece(request, model, planes[0].degrees) for request in requests]
        outcomes = await session.run([piece for piece, _ in pieces])
        reports = [*model.notes, *(f"LoRA {line}" for line in model.lora_lines)]
        if model.low_noise is not None:
            reports.append(sampling.experts.describe(model, len(sampling.schedule.timesteps)))
        reports += [
            job_text(f"mesh {mesh}", outcome.answers, requests=outcome.requests)
            for (_, mesh), outcome in zip(pieces, outcomes, strict=True)
        ]
        return session.tensor(result), "\n\n".join(reports)


def build_requests(
    session: Session,
    sampling: Sampling,
    model: ResolvedModel,
    plane: MeshDegrees,
    result: TensorRef,
) -> list[SampleRequest]:
    """Copy the tensors to where the ranks see them, and say who gets which part, on the mesh of a whole plane.

    Noise was made for the whole batch: a sample is the same in whatever piece it comes to be. result: for the batch.
    """
    tensors, schedule, experts = sampling.tensors, sampling.schedule, sampling.experts
    sizes = piece_sizes(model.degrees, batch=tensors.noisy.shape[0])

    def shares(tensor: Tensor | None, dim: int = 0) -> Sequence[TensorRef | None]:
        return [None] * len(sizes) if tensor is None else session.send_split(tensor, sizes, dim=dim)

    noisy, results = session.send_split(tensors.noisy, sizes), split_ref(result, sizes)
    clean, mask, frame_mask = map(shares, (tensors.clean, tensors.mask, tensors.frame_mask))
    step_noise = shares(tensors.step_noise, dim=1)
    cond = session.send(sampling.cond.text)
    uncond = None if sampling.uncond is None else session.send(sampling.uncond.text)
    conditions = _send_conditions(session, sampling, sizes)
    return [
        SampleRequest(
            id=f"{session.id}-{index}",
            model=experts.first,
            low_noise=experts.low_noise,
            mesh=str(plane),
            solver=sampling.solver,
            sigmas=schedule.sigmas,
            timesteps=schedule.timesteps,
            start=schedule.start,
            guidance=experts.guidance,
            noisy=noisy[index],
            clean=clean[index],
            mask=mask[index],
            frame_mask=frame_mask[index],
            cond=cond,
            uncond=uncond,
            step_noise=step_noise[index],
            result=results[index],
            conditions=conditions[index],
        )
        for index in range(len(sizes))
    ]


def build_piece(
    request: SampleRequest, model: ResolvedModel, plane: MeshDegrees
) -> tuple[Piece, MeshDegrees]:
    """The request on the mesh of the plane that suits it best, and that mesh."""
    job, memory = requested_workload(request, model.shape), model.device_memory
    mesh = choose_job_mesh(plane, job, is_auto=model.is_auto, device_memory=memory)
    piece = Piece(
        request=replace(request, mesh=str(mesh)),
        cost=rank_flops(job, MeshDegrees(), 0).job(job.steps),
        most_samples=joint_samples(mesh, job, device_memory=memory),
    )
    return piece, mesh


def _send_conditions(
    session: Session, sampling: Sampling, sizes: Sequence[int]
) -> list[tuple[Condition, ...]]:
    """The conditions of each piece: those of its samples, or one for all."""
    prompts = {COND: sampling.cond, UNCOND: sampling.uncond}
    sent = [
        [
            Condition(name=name, branch=branch, tensor=part)
            for part in _send_shares(session, tensor, sizes)
        ]
        for branch, prompt in prompts.items()
        if prompt is not None
        for name, tensor in prompt.conditions.items()
    ]
    return [tuple(parts[index] for parts in sent) for index in range(len(sizes))]


def _send_shares(session: Session, tensor: Tensor, sizes: Sequence[int]) -> tuple[TensorRef, ...]:
    """A tensor's share of each piece; one sample serves all of them."""
    if tensor.shape[0] == 1:
        return (session.send(tensor),) * len(sizes)
    return session.send_split(tensor, sizes)
