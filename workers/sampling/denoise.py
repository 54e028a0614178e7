"""The denoise loop of one rank. It stays sharded from the first step to the last.

Every rank keeps its token shard of x, of the model's outputs and of the solver's state in float32; per step only the
two guidance planes exchange their shards. The given frames of an image-to-video run are blended in before each
forward and after each step. Guidance is combined on all ranks alike, so their solver states stay equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.mesh.shape import PATCH_POSITIONS, WanShape
from comfy_wan_dist.solvers.table import Solver
from workers.model.wan import TextKeysValues, TokenRun, WanModel
from workers.parallel.collectives import AxisGroup
from workers.parallel.stages import MicroBatch, forward_in_stages


@dataclass(frozen=True, kw_only=True)
class Branch:
    """What belongs to a prompt: text keys and values of each block, and the channels that the model sees beside x.

    image [1 or B, L, D*4] float32, a token shard as x is one.
    """

    text: tuple[TextKeysValues, ...]
    image: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """What every forward of one job shares on this rank, besides x and the timestep.

    row_factors [B, R] scale the timestep of each timestep row. `branches` holds the prompt's, then the negative
    prompt's where this rank computes both.
    """

    rope: Tensor
    runs: tuple[TokenRun, ...]
    row_factors: Tensor
    branches: tuple[Branch, ...]


@dataclass(frozen=True, kw_only=True)
class KeptTokens:
    """Tokens to keep: `clean` counts where `mask` is 0. Both [B, L, P] float32 shards."""

    clean: Tensor
    mask: Tensor

    def blend(self, x: Tensor) -> Tensor:
        return torch.lerp(self.clean, x, self.mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guidance:
    """Classifier-free guidance: uncond + scale * (cond - uncond).

    `planes` is the cfg axis: at size 2 its rank 0 computes the prompt, rank 1 the negative prompt.
    """

    scale: float
    planes: AxisGroup


@dataclass(frozen=True, kw_only=True)
class Expert:
    """Who predicts in a step. Most models are one for all steps."""

    model: WanModel
    conditioning: Conditioning
    guidance: Guidance | None


def denoise(
    x: Tensor,
    *,
    expert_at: Callable[[int], Expert],
    sigmas: tuple[float, ...],
    timesteps: tuple[float, ...],
    solver: Solver,
    stages: AxisGroup,
    kept: KeptTokens | None,
    before_step: Callable[[int], None],
) -> Tensor:
    """Carry the token shard x [B, L, P] float32 from sigmas[0] to sigmas[-1].

    before_step(index) is called before each step, then expert_at(index); what they raise ends the run.
    Collectives: with a guidance mesh of 2, one all-gather of [B, L, P] float32 on cfg per step, and the model's own.
    """
    for index, timestep in enumerate(timesteps):
        before_step(index)
        model_x = x if kept is None else kept.blend(x)
        expert = expert_at(index)
        velocity = guided_velocity(
            expert.model, model_x, timestep, expert.conditioning, expert.guidance, stages
        )
        denoised = torch.sub(model_x, velocity, alpha=sigmas[index])
        if kept is not None:
            denoised = kept.blend(denoised)
        x = solver.step(index, x, denoised)
    return x


def guided_velocity(
    model: WanModel,
    x: Tensor,
    timestep: float,
    conditioning: Conditioning,
    guidance: Guidance | None,
    stages: AxisGroup,
) -> Tensor:
    """Velocity of the token shard x, [B, L, P] float32; equal on all guidance planes and stages."""
    samples = 1 if stages.size == 1 else x.shape[0]
    branches = conditioning.branches
    if guidance is not None and guidance.scale == 1 and guidance.planes.size == 1:
        branches, guidance = branches[:1], None  # the negative prompt would cancel out
    batches = [
        MicroBatch(tokens=tokens, timesteps=timesteps, text=text)
        for branch in branches
        for tokens, timesteps, text in zip(
            with_image(x, branch.image).chunk(samples),
            (conditioning.row_factors * timestep).chunk(samples),
            split_text(branch.text, samples),
            strict=True,
        )
    ]
    outputs = forward_in_stages(
        model, batches, runs=conditioning.runs, rope=conditioning.rope, pp=stages
    )
    predictions = [
        torch.cat(outputs[first : first + samples]) if samples > 1 else outputs[first]
        for first in range(0, len(outputs), samples)
    ]
    if guidance is None:
        return predictions[0]
    if guidance.planes.size == 2:
        cond, uncond = guidance.planes.all_gather(predictions[0])
    else:
        cond, uncond = predictions
    return torch.add(uncond, cond - uncond, alpha=guidance.scale)


def with_image(x: Tensor, image: Tensor | None) -> Tensor:
    """Tokens [B, L, (C+D)*4] of latent and image: the features of a token are (row, column, channel)."""
    if image is None:
        return x
    parts = (x, image.expand(x.shape[0], -1, -1))
    return torch.cat([part.unflatten(-1, (PATCH_POSITIONS, -1)) for part in parts], -1).flatten(-2)


def split_text(
    branch: tuple[TextKeysValues, ...], samples: int
) -> list[tuple[TextKeysValues, ...]]:
    """The text of each of `samples` micro-batches: one prompt serves all, or each sample has its own."""
    own = [
        [
            TextKeysValues(keys=keys, values=values)
            for keys, values in zip(
                text.keys.chunk(samples), text.values.chunk(samples), strict=True
            )
        ]
        for text in branch
    ]
    return [tuple(texts[i % len(texts)] for texts in own) for i in range(samples)]


def frame_rows(
    frame_mask: Tensor | None, *, batch: int, frames: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Distinct timestep factors [B, R] float32 and the row of each frame.

    frame_mask [B, T]: 1 where a frame is generated, 0 where it is given, between where it is partly given.
    """
    if frame_mask is None:
        return torch.ones(batch, 1), (0,) * frames
    factors, rows = torch.unique(frame_mask, dim=1, return_inverse=True)
    return factors, tuple(rows.tolist())


def validate_text(context: Tensor, *, text_dim: int, batch: int, label: str) -> None:
    """Refuse a prompt embedding that does not fit the model or the batch."""
    if context.dim() != 3 or context.shape[-1] != text_dim or context.shape[0] not in (1, batch):
        raise ConfigError(
            f"the {label} conditioning has shape {list(context.shape)}; this model needs [1, tokens, {text_dim}]: "
            "encode the prompt with the umT5 text encoder of Wan (CLIPLoader type wan)"
        )


def validate_image(image: Tensor | None, shape: WanShape, latent: Tensor, *, label: str) -> None:
    """Refuse an image conditioning that does not fit the model or the latent."""
    if image is None and shape.image_dim == 0:
        return
    got = "none" if image is None else f"shape {list(image.shape)}"
    if image is None or image.shape not in (
        (1, shape.image_dim, *latent.shape[2:]),
        (latent.shape[0], shape.image_dim, *latent.shape[2:]),
    ):
        needed = (
            f"[1 or {latent.shape[0]}, {shape.image_dim}, {', '.join(map(str, latent.shape[2:]))}]"
            if shape.image_dim
            else "none"
        )
        raise ConfigError(
            f"the {label} image conditioning is {got}, this model and latent need {needed}; "
            "make it with WanImageToVideo for an I2V model, and leave it out for others"
        )
