"""A sampler node's work as pieces for the planes: cut along the batch, each piece on the mesh that suits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..comfyui.conditioning import Prompt
from ..comfyui.latent import SamplingTensors
from ..group.scheduler import Piece
from ..ipc.messages import SampleRequest, TensorRef
from ..ipc.shared import split_ref
from ..mesh.choice import choose_job_mesh, joint_samples, piece_sizes
from ..mesh.degrees import MeshDegrees
from ..mesh.flops import rank_flops
from ..mesh.shape import LatentGrid
from ..mesh.workload import PlannedJob
from ..solvers.schedules import Schedule
from .experts import Experts
from .handle import ResolvedModel
from .session import Session


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


def build_pieces(
    job: Session, sampling: Sampling, model: ResolvedModel, plane: MeshDegrees
) -> SamplingPieces:
    """Copy the tensors to where the ranks see them, and say who gets which part.

    Noise was made for the whole batch: a sample is the same in whatever piece it comes to be.
    """
    tensors, schedule, experts = sampling.tensors, sampling.schedule, sampling.experts
    batch, _, frames, height, width = tensors.noisy.shape
    grid = LatentGrid(frames=frames, rows=height // 2, columns=width // 2)
    sizes = piece_sizes(model.degrees, batch=batch)
    result = job.reserve(tensors.noisy.shape)
    noisy, results = job.send_split(tensors.noisy, sizes), split_ref(result, sizes)
    clean = job.send_split_optional(tensors.clean, sizes)
    mask = job.send_split_optional(tensors.mask, sizes)
    frame_mask = job.send_split_optional(tensors.frame_mask, sizes)
    step_noise = job.send_split_optional(tensors.step_noise, sizes, dim=1)
    cond = job.send(sampling.cond.text)
    cond_images = _send_images(job, sampling.cond.image, sizes)
    uncond: TensorRef | None = None
    uncond_images: tuple[TensorRef | None, ...] = (None,) * len(sizes)
    if sampling.uncond is not None:
        uncond = job.send(sampling.uncond.text)
        uncond_images = _send_images(job, sampling.uncond.image, sizes)
    jobs = [planned_job(sampling, model, grid, batch=size) for size in sizes]
    meshes = tuple(
        choose_job_mesh(plane, each, is_auto=model.is_auto, device_memory=model.device_memory)
        for each in jobs
    )

    def piece(index: int) -> Piece:
        request = SampleRequest(
            id=f"{job.id}-{index}",
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
            cond_image=cond_images[index],
            uncond_image=uncond_images[index],
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


def _send_images(
    job: Session, images: Tensor | None, sizes: Sequence[int]
) -> tuple[TensorRef | None, ...]:
    """One image for each sample, or one for all pieces."""
    if images is not None and images.shape[0] == 1:
        return (job.send(images),) * len(sizes)
    return job.send_split_optional(images, sizes)


def planned_job(
    sampling: Sampling, model: ResolvedModel, grid: LatentGrid, *, batch: int
) -> PlannedJob:
    """A piece of `batch` samples in the numbers that decide what it costs."""
    cond, uncond = sampling.cond, sampling.uncond
    return PlannedJob(
        shape=model.shape,
        grid=grid,
        steps=len(sampling.schedule.timesteps),
        guided=sampling.is_guided,
        batch=batch,
        dtype=model.spec.dtype,
        text_tokens=(cond.text.shape[1], (uncond or cond).text.shape[1]),
    )
