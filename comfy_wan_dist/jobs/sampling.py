"""A sampler node's work: cut along the batch into pieces for the planes, each on the mesh that suits it, and done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..comfyui.conditioning import Prompt
from ..comfyui.latent import SamplingTensors
from ..group.queue import Piece
from ..ipc.messages import COND, UNCOND, Condition, SampleRequest, TensorRef
from ..ipc.shared import split_ref
from ..mesh.choice import choose_job_mesh, joint_samples, piece_sizes
from ..mesh.degrees import MeshDegrees
from ..mesh.flops import rank_flops
from ..mesh.report import job_text
from ..mesh.shape import LatentGrid
from ..mesh.workload import Workload
from ..solvers.schedules import Schedule
from .experts import Experts
from .handle import ResolvedModel
from .session import Session, open_session, planes_for


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a sampler node was asked for. Without uncond there is no guidance.

    experts: who predicts, in turn.
    """

    tensors: SamplingTensors
    cond: Prompt
    uncond: Prompt | None
    schedule: Schedule
    solver: str
    experts: Experts

    @property
    def is_guided(self) -> bool:
        return self.uncond is not None


@dataclass(frozen=True, kw_only=True)
class SamplingPieces:
    """pieces and their meshes, in the batch's order; result: the whole batch's latent, filled when all are done."""

    pieces: tuple[Piece, ...]
    meshes: tuple[MeshDegrees, ...]
    result: TensorRef


async def sample(sampling: Sampling, model: ResolvedModel) -> tuple[Tensor, str]:
    """The batch's latent, normalised, and the report. Raises what the ranks raise."""
    planes = planes_for(model)
    async with open_session(planes) as session:
        work = build_pieces(session, sampling, model, planes[0].degrees)
        outcomes = await session.run(work.pieces)
        reports = [*model.notes, *(f"LoRA {line}" for line in model.lora_lines)]
        if model.low_noise is not None:
            reports.append(sampling.experts.describe(model, len(sampling.schedule.timesteps)))
        reports += [
            job_text(f"mesh {mesh}", outcome.answers, requests=outcome.requests)
            for mesh, outcome in zip(work.meshes, outcomes, strict=True)
        ]
        return session.tensor(work.result), "\n\n".join(reports)


def build_pieces(
    session: Session, sampling: Sampling, model: ResolvedModel, plane: MeshDegrees
) -> SamplingPieces:
    """Copy the tensors to where the ranks see them, and say who gets which part.

    Noise was made for the whole batch: a sample is the same in whatever piece it comes to be.
    """
    tensors, schedule, experts = sampling.tensors, sampling.schedule, sampling.experts
    batch, _, frames, height, width = tensors.noisy.shape
    grid = LatentGrid(frames=frames, rows=height // 2, columns=width // 2)
    sizes = piece_sizes(model.degrees, batch=batch)
    result = session.reserve(tensors.noisy.shape)
    noisy, results = session.send_split(tensors.noisy, sizes), split_ref(result, sizes)
    clean = session.send_split_optional(tensors.clean, sizes)
    mask = session.send_split_optional(tensors.mask, sizes)
    frame_mask = session.send_split_optional(tensors.frame_mask, sizes)
    step_noise = session.send_split_optional(tensors.step_noise, sizes, dim=1)
    cond = session.send(sampling.cond.text)
    uncond = None if sampling.uncond is None else session.send(sampling.uncond.text)
    conditions = _send_conditions(session, sampling, sizes)
    jobs = [piece_workload(sampling, model, grid, batch=size) for size in sizes]
    meshes = tuple(
        choose_job_mesh(plane, each, is_auto=model.is_auto, device_memory=model.device_memory)
        for each in jobs
    )

    def piece(index: int) -> Piece:
        request = SampleRequest(
            id=f"{session.id}-{index}",
            model=experts.first,
            low_noise=experts.low_noise,
            mesh=str(meshes[index]),
            solver=sampling.solver,
            sigmas=schedule.sigmas,
            timesteps=schedule.timesteps,
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
        return Piece(
            request=request,
            cost=rank_flops(jobs[index], MeshDegrees(), 0).job(len(schedule.timesteps)),
            most_samples=joint_samples(
                meshes[index], jobs[index], device_memory=model.device_memory
            ),
        )

    pieces = tuple(piece(index) for index in range(len(sizes)))
    return SamplingPieces(pieces=pieces, meshes=meshes, result=result)


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


def piece_workload(
    sampling: Sampling, model: ResolvedModel, grid: LatentGrid, *, batch: int
) -> Workload:
    """A piece of `batch` samples in the numbers that decide what it costs."""
    cond, uncond = sampling.cond, sampling.uncond
    return Workload(
        shape=model.shape,
        grid=grid,
        steps=len(sampling.schedule.timesteps),
        guided=sampling.is_guided,
        batch=batch,
        dtype=model.spec.dtype,
        text_tokens=(cond.text.shape[1], (uncond or cond).text.shape[1]),
    )
