"""Prepare this rank's part of a sampling job: everything that is local, before the ranks run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import SampleRequest, TensorRef
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from comfy_wan_dist.mesh.shards import ShardRange, TokenShards, shard_range, token_shards
from comfy_wan_dist.mesh.validate import validate_grid, validate_model
from comfy_wan_dist.solvers.table import Solver, build_solver, effective_sigmas
from workers.model.rope import rope_table
from workers.model.tokens import grid_of, patchify, token_runs, unpatchify
from workers.model.wan import TokenRun, WanModel
from workers.parallel.groups import MeshGroups

from .denoise import (
    Branch,
    Conditioning,
    Expert,
    Guidance,
    KeptTokens,
    denoise,
    frame_rows,
    validate_image,
    validate_text,
)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt's embedding [1 or B, S, text_dim], and its image conditioning as a token shard, if the model has one."""

    context: Tensor
    image: Tensor | None


@dataclass(frozen=True, kw_only=True)
class SampleRun:
    """A sampling job cut for this rank. x, kept and the solver's noise are token shards in float32."""

    grid: LatentGrid
    samples: ShardRange
    shards: TokenShards
    x: Tensor
    kept: KeptTokens | None
    solver: Solver
    row_factors: Tensor
    runs: tuple[TokenRun, ...]
    rope: Tensor
    prompts: tuple[Prompt, ...]
    guidance: Guidance | None
    final_scale: float


def prepare_sample(
    request: SampleRequest,
    model: WanModel,
    *,
    tensor: Callable[[TensorRef], Tensor],
    groups: MeshGroups,
    device: torch.device,
) -> SampleRun:
    """Validate the request and cut its tensors for this rank. No collectives. Raises ConfigError, MeshError."""
    noisy = tensor(request.noisy)
    validate_latent(noisy, model.shape)
    if request.frame_mask is not None and not model.shape.has_frame_times:
        raise ConfigError(
            "frames are given, but this model has one timestep for all of them; leave out the mask"
        )
    validate_steps(request, noisy)
    batch, grid = noisy.shape[0], grid_of(noisy)
    validate_model(groups.degrees, model.shape)
    validate_grid(groups.degrees, grid, batch=batch)
    samples = shard_range(batch, parts=groups.dp.size, rank=groups.dp.rank)
    shards = token_shards(
        grid.tokens,
        cp=(groups.cp.size, groups.cp.rank),
        sp=(groups.tp.size, groups.tp.rank) if groups.degrees.sp else (1, 0),
    )

    def own_samples(x: Tensor) -> Tensor:
        return x if x.shape[0] == 1 < batch else x[samples.start : samples.stop]

    def own_tokens(latent: Tensor) -> Tensor:
        tokens = patchify(own_samples(latent))
        return tokens[:, shards.start : shards.stop].to(device, copy=True)

    def shard_tokens(latent: Tensor) -> Tensor:
        return own_tokens(latent.expand_as(noisy))

    def step_noise(index: int) -> Tensor:
        assert request.step_noise is not None
        return shard_tokens(tensor(request.step_noise)[index])

    def prompt(label: str, text: TensorRef, image: TensorRef | None) -> Prompt:
        context = tensor(text)
        validate_text(context, text_dim=model.shape.text_dim, batch=batch, label=label)
        latent = None if image is None else tensor(image)
        validate_image(latent, model.shape, noisy, label=label)
        return Prompt(
            context=own_samples(context).to(device, copy=True),
            image=None if latent is None else own_tokens(latent),
        )

    prompts = [prompt("positive", request.cond, request.cond_image)]
    guidance = None
    if request.uncond is not None:
        prompts.append(prompt("negative", request.uncond, request.uncond_image))
        guidance = Guidance(scale=request.guidance, planes=groups.cfg)
        if groups.cfg.size == 2:
            prompts = [prompts[groups.cfg.rank]]

    frame_mask = None
    if request.frame_mask is not None:
        frame_mask = own_samples(tensor(request.frame_mask))
    row_factors, rows = frame_rows(frame_mask, batch=samples.size, frames=grid.frames)
    kept = None
    if request.mask is not None and request.clean is not None:
        kept = KeptTokens(
            clean=shard_tokens(tensor(request.clean)), mask=shard_tokens(tensor(request.mask))
        )
    return SampleRun(
        grid=grid,
        samples=samples,
        shards=shards,
        x=shard_tokens(noisy),
        kept=kept,
        solver=build_solver(
            request.solver,
            sigmas=request.sigmas,
            step_noise=step_noise if request.step_noise is not None else None,
        ),
        row_factors=row_factors.to(device),
        runs=token_runs(rows, grid, shards.start, shards.stop),
        rope=rope_table(grid, shards.cp.start, shards.cp.stop, device=device),
        prompts=tuple(prompts),
        guidance=guidance,
        final_scale=1 / (1 - effective_sigmas(request.solver, request.sigmas)[-1]),
    )


def run_sample(
    run: SampleRun,
    request: SampleRequest,
    model: WanModel,
    *,
    groups: MeshGroups,
    before_step: Callable[[int], None],
    switch: Callable[[], WanModel],
) -> Tensor:
    """Denoise together with the other ranks; returns the whole latent [B, C, T, h, w] float32 on every rank.

    switch() makes the request's low-noise expert ready, when it is its turn; `model` is not needed any more then.
    """

    def expert(model: WanModel, guidance: float) -> Expert:
        conditioning = Conditioning(
            rope=run.rope,
            runs=run.runs,
            row_factors=run.row_factors,
            branches=encode_prompts(model, run.prompts),
        )
        scaled = None if run.guidance is None else replace(run.guidance, scale=guidance)
        return Expert(model=model, conditioning=conditioning, guidance=scaled)

    current = expert(model, request.guidance)

    def expert_at(index: int) -> Expert:
        nonlocal current
        low = request.low_noise
        if low is not None and index == low.from_step:
            current = expert(switch(), low.guidance)
        return current

    x = denoise(
        run.x,
        expert_at=expert_at,
        sigmas=request.sigmas,
        timesteps=request.timesteps,
        solver=run.solver,
        stages=groups.pp,
        kept=run.kept,
        before_step=before_step,
    )
    tokens = groups.dp.gather_rows(gather_tokens(x, run.shards, groups), run.samples.sizes)
    return unpatchify(tokens, run.grid) * run.final_scale


def encode_prompts(model: WanModel, prompts: tuple[Prompt, ...]) -> tuple[Branch, ...]:
    """What `model` makes of each prompt once per job. Collectives: those of the model's tp."""
    return tuple(Branch(text=model.encode_text(p.context), image=p.image) for p in prompts)


def gather_tokens(x_BLP: Tensor, shards: TokenShards, groups: MeshGroups) -> Tensor:
    """All tokens on every rank. Collectives: with sp one gather on tp, then one on cp."""
    rows = x_BLP.transpose(0, 1)
    if groups.degrees.sp:
        rows = groups.tp.gather_rows(rows, shards.sp.sizes)
    return groups.cp.gather_rows(rows, shards.cp.sizes).transpose(0, 1)


def validate_latent(latent: Tensor, shape: WanShape) -> None:
    """Refuse a latent that a model of this shape cannot denoise."""
    stride = shape.vae_stride
    if latent.dim() != 5 or latent.shape[1] != shape.out_dim:
        raise ConfigError(
            f"the latent has shape {list(latent.shape)}; this model needs [batch, {shape.out_dim}, frames, "
            f"height/{stride}, width/{stride}]: use a latent node made for it"
        )
    if latent.shape[3] % 2 or latent.shape[4] % 2 or 0 in latent.shape:
        raise ConfigError(
            f"the latent is {latent.shape[4]} wide and {latent.shape[3]} high; both must be even and above 0: "
            f"choose a video width and height that are multiples of {2 * stride}"
        )


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
