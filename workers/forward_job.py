"""A single forward on one rank: ComfyUI's own samplers step, and ask for one prediction after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import COND, ForwardRequest, TensorRef
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.workload import Workload, forward_workload

from .job import Job, stop_if_asked, together
from .parallel.groups import MeshGroups
from .resident.transformers import WantedModels
from .sampling.forward import (
    Forward,
    ForwardInputs,
    PromptTensors,
    RankInputs,
    encode_prompt,
    prepare_forward,
    validate_latent,
)
from .transformer_job import TransformerWork, groups_for, read_conditions


def forward(request: ForwardRequest, job: Job, work: TransformerWork) -> None:
    """Carry out `request` together with the plane's other ranks. Collectives: votes, and those of the forward."""
    transformers, device = work.transformers, work.device
    groups = groups_for(request, work.plane, job)

    def workload(shape: WanShape) -> Workload:
        validate_latent(request.x.shape, shape)
        return forward_workload(request, shape)

    wanted = WantedModels(model=request.model, low_noise=None, workload=workload)
    loaded, _ = transformers.have(wanted, groups, job)
    inputs = together(
        job, lambda: prepare_request(request, loaded.model.shape, job.tensor, groups, device)
    )
    transformers.let_idle_go(wanted, loaded.model.shape, groups, job)
    stop_if_asked(job)
    loaded.fit_to(inputs.shards, groups)
    assert transformers.model.held is not None, "it was asked for above"
    own = inputs.samples
    text = transformers.model.held.prompts.have(
        request.prompts[own.start : own.stop],
        lambda: encode_prompt(loaded.model, inputs.branches[0], device),
    )
    predictor = Forward(model=loaded.model, inputs=inputs, text=(text,), guidance=None)
    velocity = inputs.gather(predictor.predict(inputs.shard(job.tensor(request.x)), 1.0))

    def write_result() -> None:
        if groups.rank == 0:
            job.tensor(request.result).copy_(velocity)

    together(job, write_result)


def prepare_request(
    request: ForwardRequest,
    shape: WanShape,
    tensor: Callable[[TensorRef], Tensor],
    groups: MeshGroups,
    device: torch.device,
) -> RankInputs:
    """The request cut for this rank, its timesteps as factors of 1. No collectives. Raises ConfigError, MeshError."""
    batch, frames = request.x.shape[0], request.x.shape[2]
    if request.timesteps.shape not in ((batch, 1), (batch, frames)):
        raise ConfigError(
            f"the timesteps have shape {list(request.timesteps.shape)}; this latent needs {[batch, 1]} or "
            f"{[batch, frames]}. Context windows may not go together with given frames: leave out one of them"
        )
    if len(request.prompts) != batch or request.text.shape[:1] != (batch,):
        raise ConfigError(
            f"{len(request.prompts)} prompts and text of shape {list(request.text.shape)} were given for {batch} "
            "samples; each sample needs its own"
        )
    given = ForwardInputs(
        latent=tensor(request.x),
        cond=PromptTensors(
            text=tensor(request.text), conditions=read_conditions(request.conditions, tensor)[COND]
        ),
        uncond=None,
        frame_factors=tensor(request.timesteps),
    )
    return prepare_forward(given, shape, groups, device)
