"""A sampler node's work as pieces for the planes: cut along the batch, each piece on the mesh that suits it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .comfy_adapter import SamplingTensors
from .group.scheduler import Piece
from .handle import ResolvedModel
from .ipc.messages import SampleRequest, TensorRef
from .ipc.shared import split_ref
from .mesh.choice import choose_job_mesh, joint_samples, piece_sizes
from .mesh.degrees import MeshDegrees
from .mesh.job_cost import sample_flops
from .mesh.shape import LatentGrid
from .schedules import Schedule
from .session import Session


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a sampler node was asked for. cond, uncond: [1, S, text_dim]; without uncond there is no guidance."""

    tensors: SamplingTensors
    cond: Tensor
    uncond: Tensor | None
    schedule: Schedule
    solver: str
    cfg: float

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
    tensors, schedule = sampling.tensors, sampling.schedule
    batch, _, frames, height, width = tensors.noisy.shape
    grid = LatentGrid(frames=frames, rows=height // 2, columns=width // 2)
    sizes = piece_sizes(model.degrees, batch=batch)
    result = job.reserve(tensors.noisy.shape)
    noisy, results = job.send_split(tensors.noisy, sizes), split_ref(result, sizes)
    clean = job.send_split_optional(tensors.clean, sizes)
    mask = job.send_split_optional(tensors.mask, sizes)
    frame_mask = job.send_split_optional(tensors.frame_mask, sizes)
    step_noise = job.send_split_optional(tensors.step_noise, sizes, dim=1)
    cond, uncond = job.send(sampling.cond), job.send_optional(sampling.uncond)
    meshes = tuple(_piece_mesh(model, plane, grid, size, sampling.is_guided) for size in sizes)

    def piece(index: int) -> Piece:
        request = SampleRequest(
            id=f"{job.id}-{index}",
            model=model.spec,
            mesh=str(meshes[index]),
            solver=sampling.solver,
            sigmas=schedule.sigmas,
            timesteps=schedule.timesteps,
            guidance=sampling.cfg,
            noisy=noisy[index],
            clean=clean[index],
            mask=mask[index],
            frame_mask=frame_mask[index],
            cond=cond,
            uncond=uncond,
            step_noise=step_noise[index],
            result=results[index],
        )
        return Piece(
            request=request,
            cost=sample_flops(
                model.shape,
                grid,
                steps=len(schedule.timesteps),
                branches=1 + sampling.is_guided,
                batch=sizes[index],
            ),
            most_samples=joint_samples(
                meshes[index],
                model.shape,
                grid,
                batch=sizes[index],
                guided=sampling.is_guided,
                device_memory=model.device_memory,
                dtype=model.spec.dtype,
            ),
        )

    pieces = tuple(piece(index) for index in range(len(sizes)))
    return SamplingPieces(pieces=pieces, meshes=meshes, result=result)


def _piece_mesh(
    model: ResolvedModel, plane: MeshDegrees, grid: LatentGrid, size: int, is_guided: bool
) -> MeshDegrees:
    return choose_job_mesh(
        plane,
        model.shape,
        grid,
        batch=size,
        guided=is_guided,
        is_auto=model.is_auto,
        device_memory=model.device_memory,
        dtype=model.spec.dtype,
    )
