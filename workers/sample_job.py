"""A sampling request, from the model that it names to the latent in ComfyUI's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import SampleRequest
from comfy_wan_dist.mesh.degrees import MeshDegrees, parse_mesh
from comfy_wan_dist.mesh.layout import job_ranks

from .job import Job, stop_if_asked, together
from .model.wan import WanModel
from .parallel.compile import outside_graphs
from .parallel.groups import MeshGroups, PlaneGroups
from .resident.transformers import Transformers
from .sampling.run import prepare_sample, run_sample


def sample(
    request: SampleRequest,
    job: Job,
    *,
    plane: PlaneGroups,
    transformers: Transformers,
    device: torch.device,
) -> None:
    """Carry out `request` together with the plane's other ranks. Collectives: votes, and those of the run."""
    groups = groups_for(request, plane, job)
    loaded, take_turns = transformers.have(request, groups, job)
    shape = loaded.model.shape
    run = together(
        job,
        lambda: prepare_sample(request, shape, tensor=job.tensor, groups=groups, device=device),
    )
    transformers.let_idle_go(request, shape, groups, job)
    loaded.fit_to(run.inputs.shards, groups)

    def switch() -> WanModel:
        low = transformers.switch_to_low_noise(take_turns=take_turns, job=job)
        low.fit_to(run.inputs.shards, groups)
        return low.model

    steps = len(request.timesteps)
    latent = run_sample(
        run, request, loaded.model, observers=(StepReport(job, steps),), switch=switch
    )

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


class StepReport:
    """An observer that says how far the run is, and stops it once any rank has been told to stop."""

    def __init__(self, job: Job, steps: int) -> None:
        self._job = job
        self._steps = steps

    def before_step(self, index: int) -> None:
        """Collectives: one vote."""
        if index:
            self._job.report("sample", index, self._steps)
        stop_if_asked(self._job)

    def after_step(self, index: int, x: Tensor, denoised: Tensor) -> None:
        pass


def groups_for(request: SampleRequest, plane: PlaneGroups, job: Job) -> MeshGroups:
    """Groups of the request's mesh. Collectives: a vote, and the making of groups that no earlier job needed."""

    def check() -> MeshDegrees:
        degrees = parse_mesh(request.mesh)
        if degrees is None:
            raise ConfigError("a job's mesh is auto; name one")
        job_ranks(plane.layout, degrees)
        return degrees

    groups = plane.for_mesh(together(job, check))
    return outside_graphs(groups) if request.model.compile else groups
