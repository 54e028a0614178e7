"""A single forward on one rank: ComfyUI's own samplers step, and ask for one prediction after the other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError, JobCancelled
from comfy_wan_dist.ipc.messages import COND, ForwardRequest
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.workload import Workload, forward_workload

from .job import Job, groups_for, read_conditions, together, together_or_none
from .parallel.groups import MeshGroups
from .parallel.parallelize import ParallelModel
from .resident.transformers import TransformerWork, WantedModels
from .sampling.forward import (
    Forward,
    ForwardInputs,
    PromptTensors,
    RankInputs,
    encode_prompt,
    own_tokens,
    prepare_forward,
    validate_latent,
)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A forward that nothing of this rank stands in the way of any more. result: where it goes."""

    loaded: ParallelModel
    inputs: RankInputs
    result: Tensor


def forward(request: ForwardRequest, job: Job, work: TransformerWork) -> None:
    """Carry out `request` together with the plane's other ranks. Collectives: votes, and those of the forward.

    A sampler asks for hundreds, so there are no more votes than it takes: of the model and what is given, of the end.
    """
    transformers, device = work.transformers, work.device
    groups = groups_for(request, work.plane)

    def workload(shape: WanShape) -> Workload:
        validate_latent(request.x.shape, shape)
        return forward_workload(request, shape)

    def begin(loaded: ParallelModel) -> Begun:
        if job.cancel_requested():
            raise JobCancelled("the job was stopped on request")
        inputs = prepare_request(request, loaded.model.shape, groups, job=job, work=work)
        return Begun(loaded=loaded, inputs=inputs, result=job.tensor(request.result))

    def begin_at_once() -> Begun | None:
        loaded = transformers.ready(request.model)
        return None if loaded is None else begin(loaded)

    wanted = WantedModels(model=request.model, low_noise=None, workload=workload)
    begun = together_or_none(job, begin_at_once)
    if begun is None:
        loaded, _ = transformers.have(wanted, groups, job)
        begun = together(job, lambda: begin(loaded))
    model, inputs = begun.loaded.model, begun.inputs
    transformers.let_idle_go(wanted, model.shape, groups, job)
    begun.loaded.fit_to(inputs.shards, groups)
    assert transformers.model.held is not None, "it was asked for above"
    own = inputs.samples
    text = transformers.model.held.prompts.have(
        request.prompts[own.start : own.stop],
        lambda: encode_prompt(model, inputs.branches[0], device),
    )
    x = own_tokens(job.tensor(request.x), own, inputs.shards).to(device)
    predictor = Forward(model=model, inputs=inputs, text=(text,), guidance=None)
    velocity = predictor.predict(x, 1.0)
    if work.is_one_machine:
        inputs.write(velocity, begun.result)
        return
    whole = inputs.gather(velocity)
    if groups.rank == 0:
        begun.result.copy_(whole)


def prepare_request(
    request: ForwardRequest,
    shape: WanShape,
    groups: MeshGroups,
    *,
    job: Job,
    work: TransformerWork,
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
        latent=job.tensor(request.x),
        cond=PromptTensors(
            text=job.tensor(request.text),
            conditions=read_conditions(request.conditions, job.tensor)[COND],
        ),
        uncond=None,
        frame_factors=job.tensor(request.timesteps),
    )
    return prepare_forward(given, shape, groups, work.device, rope_of=work.ropes)
