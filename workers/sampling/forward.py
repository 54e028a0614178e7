"""One prediction of the model on this rank: what it needs is prepared once, then x and a timestep give a velocity.

    inputs = prepare_forward(given, shape, groups, device)      local, before a vote
    forward = build_forward(model, inputs, guidance=scale)      together from here on
    velocity = forward.predict(inputs.shard(latent), timestep)
    latent = inputs.gather(velocity)

Nothing here knows of schedules, solvers or requests. x and velocity are token shards [B, L, P] in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.mesh.shape import ConditionKind, LatentGrid, WanShape
from comfy_wan_dist.mesh.shards import ShardRange, TokenShards, shard_range, token_shards
from comfy_wan_dist.mesh.validate import validate_grid, validate_model
from workers.model.tokens import grid_of, patchify, rope_table, token_runs, unpatchify, write_tokens
from workers.model.wan import TextKeysValues, TokenRun, WanModel
from workers.parallel.groups import MeshGroups
from workers.parallel.stages import MicroBatch, forward_in_stages


class RopeTable(Protocol):
    """`rope_table`, or what gives the same."""

    def __call__(
        self, grid: LatentGrid, start: int, stop: int, *, device: torch.device
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class PromptTensors:
    """A prompt, whole or this rank's part of it.

    text [1 or B, S, text_dim]. conditions, by name: as the model's shape has them; of those that lie on tokens this
    rank's part is [1 or B, L, D*4] float32.
    """

    text: Tensor
    conditions: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ForwardInputs:
    """What every rank is given for the forwards of a latent [B, C, T, h, w], whole and on the CPU.

    latent: any of the right shape. Without uncond there is no guidance. frame_factors [B, 1 or T] scale the timesteps
    of all latent frames, or of each.
    """

    latent: Tensor
    cond: PromptTensors
    uncond: PromptTensors | None
    frame_factors: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RankInputs:
    """ForwardInputs cut for this rank.

    branches: the prompts that this rank computes, the negative one last. row_factors [B, R] scale the timestep of
    each timestep row. size: of the whole latent.
    """

    size: torch.Size
    grid: LatentGrid
    samples: ShardRange
    shards: TokenShards
    row_factors: Tensor
    runs: tuple[TokenRun, ...]
    rope: Tensor
    branches: tuple[PromptTensors, ...]
    groups: MeshGroups
    device: torch.device

    def shard(self, latent: Tensor) -> Tensor:
        """This rank's samples and tokens of a latent [B, 1 or C, T, h, w], a copy on its device; always C channels."""
        whole = latent.expand(self.size)
        return own_tokens(whole, self.samples, self.shards).to(self.device, copy=True)

    def gather(self, x_BLP: Tensor) -> Tensor:
        """The latent [B, C, T, h, w] on every rank. Collectives: a gather on cp, one on dp, and with sp one on tp."""
        tokens = self.groups.dp.gather_rows(self._own_samples(x_BLP), self.samples.sizes)
        return unpatchify(tokens, self.grid)[..., : self.size[3], : self.size[4]]

    def write(self, x_BLP: Tensor, latent: Tensor) -> None:
        """Write this rank's part into the latent [B, C, T, h, w], which all ranks see. No collectives.

        Ranks that have the same part share the writing.
        """
        groups = self.groups
        copies, copy = 1, 0
        for axis in (groups.cfg, groups.pp, *([] if groups.degrees.sp else [groups.tp])):
            copies, copy = copies * axis.size, copy * axis.size + axis.rank
        own = shard_range(x_BLP.shape[1], parts=copies, rank=copy)
        write_tokens(
            x_BLP[:, own.start : own.stop].cpu(),
            self.grid,
            self.shards.start + own.start,
            latent[self.samples.start : self.samples.stop],
        )

    def pad(self, x_BLP: Tensor) -> Tensor:
        """x with its padding as `patchify` makes it. Collectives: if there is any those of `gather` but dp's."""
        if not self.grid.is_padded:
            return x_BLP
        latent = unpatchify(self._own_samples(x_BLP), self.grid)
        padded = patchify(latent[..., : self.size[3], : self.size[4]])
        return padded[:, self.shards.start : self.shards.stop]

    def _own_samples(self, x_BLP: Tensor) -> Tensor:
        """All tokens of this rank's samples."""
        groups, rows = self.groups, x_BLP.transpose(0, 1)
        if groups.degrees.sp:
            rows = groups.tp.gather_rows(rows, self.shards.sp.sizes)
        return groups.cp.gather_rows(rows, self.shards.cp.sizes).transpose(0, 1)


def prepare_forward(
    given: ForwardInputs,
    shape: WanShape,
    groups: MeshGroups,
    device: torch.device,
    *,
    rope_of: RopeTable | None = None,
) -> RankInputs:
    """Validate the inputs and cut them for this rank. No collectives. Raises ConfigError, MeshError.

    rope_of: has the rotary table from before; without it is made.
    """
    validate_latent(given.latent.shape, shape)
    batch, grid = given.latent.shape[0], grid_of(given.latent)
    validate_model(groups.degrees, shape)
    validate_grid(groups.degrees, grid, batch=batch)
    samples = shard_range(batch, parts=groups.dp.size, rank=groups.dp.rank)
    shards = token_shards(
        grid.tokens,
        cp=(groups.cp.size, groups.cp.rank),
        sp=(groups.tp.size, groups.tp.rank) if groups.degrees.sp else (1, 0),
    )

    def own_prompt(prompt: PromptTensors, label: str) -> PromptTensors:
        validate_text(prompt.text, text_dim=shape.text_dim, batch=batch, label=label)
        validate_conditions(prompt.conditions, shape, given.latent, label=label)
        own = {
            kind.name: own_tokens(prompt.conditions[kind.name], samples, shards)
            if kind.on_tokens
            else own_samples(prompt.conditions[kind.name], samples)
            for kind in shape.conditions
            if kind.channels
        }
        return PromptTensors(
            text=own_samples(prompt.text, samples),
            conditions={name: part.to(device, copy=True) for name, part in own.items()},
        )

    named = ((given.cond, "positive"), (given.uncond, "negative"))
    branches = [own_prompt(prompt, label) for prompt, label in named if prompt is not None]
    if len(branches) == groups.cfg.size == 2:
        branches = [branches[groups.cfg.rank]]
    factors = None if given.frame_factors is None else own_samples(given.frame_factors, samples)
    row_factors, rows = frame_rows(factors, batch=samples.size, frames=grid.frames)
    if len(set(rows)) > 1 and not shape.has_frame_times:
        raise ConfigError(
            "frames are given, but this model has one timestep for all of them; leave out the mask"
        )
    return RankInputs(
        size=given.latent.shape,
        grid=grid,
        samples=samples,
        shards=shards,
        row_factors=row_factors.to(device),
        runs=token_runs(rows, grid, shards.start, shards.stop),
        rope=(rope_of or rope_table)(grid, shards.cp.start, shards.cp.stop, device=device),
        branches=tuple(branches),
        groups=groups,
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A model made ready for the forwards of one set of inputs. Made by `build_forward`.

    text: the blocks' keys and values of each branch.
    """

    model: WanModel
    inputs: RankInputs
    text: tuple[tuple[TextKeysValues, ...], ...]
    guidance: float | None

    def predict(self, x: Tensor, timestep: float) -> Tensor:
        """Velocity of the token shard x, [B, L, P] float32; equal on the ranks of cfg and on all stages.

        Collectives: those of `RankInputs.pad`, the model's own, those of `forward_in_stages`, and with two branches on
        a cfg axis of 2 one all-gather of [B, L, P] float32.
        """
        inputs, scale = self.inputs, self.guidance
        x = inputs.pad(x)
        groups, branches = inputs.groups, list(zip(inputs.branches, self.text, strict=True))
        if scale == 1 and groups.cfg.size == 1:
            branches, scale = branches[:1], None  # the negative prompt would cancel out
        samples = 1 if groups.pp.size == 1 else x.shape[0]
        timesteps = inputs.row_factors * timestep
        batches = [
            batch
            for prompt, text in branches
            for batch in micro_batches(x, timesteps, text, prompt.conditions, samples)
        ]
        outputs = forward_in_stages(
            self.model, batches, runs=inputs.runs, rope=inputs.rope, pp=groups.pp
        )
        predictions = [
            torch.cat(outputs[first : first + samples]) if samples > 1 else outputs[first]
            for first in range(0, len(outputs), samples)
        ]
        if scale is None:
            return predictions[0]
        cond, uncond = (
            predictions if len(predictions) == 2 else groups.cfg.all_gather(predictions[0])
        )
        return torch.add(uncond, cond - uncond, alpha=scale)


def build_forward(model: WanModel, inputs: RankInputs, *, guidance: float | None) -> Forward:
    """Encode the prompts with `model`, once for all forwards. Collectives: those of the model's tp.

    guidance: the scale of classifier-free guidance, uncond + scale * (cond - uncond); None without a negative prompt.
    The cfg axis, at size 2, has the prompt on its rank 0 and the negative prompt on rank 1.
    """
    text = tuple(encode_prompt(model, prompt, inputs.device) for prompt in inputs.branches)
    return Forward(model=model, inputs=inputs, text=text, guidance=guidance)


def encode_prompt(
    model: WanModel, prompt: PromptTensors, device: torch.device
) -> tuple[TextKeysValues, ...]:
    """The blocks' keys and values of this rank's part of a prompt. Collectives: those of the model's tp and fsdp."""
    return model.encode_text(prompt.text.to(device), prompt.conditions)


def micro_batches(
    x: Tensor,
    timesteps: Tensor,
    text: tuple[TextKeysValues, ...],
    conditions: Mapping[str, Tensor],
    count: int,
) -> Iterator[MicroBatch]:
    """One branch in `count` parts of as many samples; what has one sample for all serves each part."""

    def parts(tensor: Tensor) -> list[Tensor]:
        own = tensor.chunk(count)
        return [own[index % len(own)] for index in range(count)]

    tokens, times = parts(x), parts(timesteps)
    texts = [(parts(each.keys), parts(each.values)) for each in text]
    named = {name: parts(each) for name, each in conditions.items()}
    for index in range(count):
        yield MicroBatch(
            tokens=tokens[index],
            timesteps=times[index],
            text=tuple(
                TextKeysValues(keys=keys[index], values=values[index]) for keys, values in texts
            ),
            conditions={name: own[index] for name, own in named.items()},
        )


def own_tokens(latent: Tensor, samples: ShardRange, shards: TokenShards) -> Tensor:
    """This rank's part [B or 1, L, P] of a latent, or of whatever else lies on its positions."""
    per_frame = grid_of(latent).tokens_per_frame
    first, last = shards.start // per_frame, -(-shards.stop // per_frame)
    tokens = patchify(own_samples(latent, samples)[:, :, first:last])
    return tokens[:, shards.start - first * per_frame : shards.stop - first * per_frame]


def own_samples(x: Tensor, samples: ShardRange) -> Tensor:
    """This rank's samples of x [B or 1, ...]; one for all stays one."""
    return x if x.shape[0] == 1 < sum(samples.sizes) else x[samples.start : samples.stop]


def frame_rows(
    frame_factors: Tensor | None, *, batch: int, frames: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Distinct timestep factors [B, R] float32 and the row of each frame.

    frame_factors [B, 1 or T]: 1 where a frame is generated, 0 where it is given, between where it is partly given; or
    whole timesteps.
    """
    if frame_factors is None:
        frame_factors = torch.ones(batch, 1)
    factors, rows = torch.unique(frame_factors, dim=1, return_inverse=True)
    return factors, tuple(rows.expand(frames).tolist())


def validate_latent(size: Sequence[int], shape: WanShape) -> None:
    """Refuse a latent of a size that a model of this shape cannot denoise."""
    stride = shape.vae_stride
    if len(size) != 5 or size[1] != shape.out_dim or 0 in size:
        raise ConfigError(
            f"the latent has shape {list(size)}; this model needs [batch, {shape.out_dim}, frames, "
            f"height/{stride}, width/{stride}]: use a latent node made for it"
        )


def validate_text(context: Tensor, *, text_dim: int, batch: int, label: str) -> None:
    """Refuse a prompt embedding that does not fit the model or the batch."""
    if context.dim() != 3 or context.shape[-1] != text_dim or context.shape[0] not in (1, batch):
        raise ConfigError(
            f"the {label} conditioning has shape {list(context.shape)}; this model needs [1, tokens, {text_dim}]: "
            "encode the prompt with the umT5 text encoder of Wan (CLIPLoader type wan)"
        )


def validate_conditions(
    conditions: Mapping[str, Tensor], shape: WanShape, latent: Tensor, *, label: str
) -> None:
    """Refuse conditions that a model of `shape` does not take, lacks, or that do not fit the latent [B, C, T, h, w]."""
    taken = {kind.name: kind for kind in shape.conditions}
    for name in {**taken, **conditions}:
        kind = taken.get(name) or ConditionKind(name=name, channels=0)
        given = conditions.get(name)
        if given is None and kind.channels == 0:
            continue
        if given is None or not _fits(given, kind, latent):
            got = "none" if given is None else f"shape {list(given.shape)}"
            raise ConfigError(
                f"the {label} {name} conditioning is {got}, this model and latent need {_needed(kind, latent)}; "
                f"{kind.remedy}"
            )


def _fits(given: Tensor, kind: ConditionKind, latent: Tensor) -> bool:
    if kind.channels == 0 or given.dim() == 0 or given.shape[0] not in (1, latent.shape[0]):
        return False
    if kind.on_tokens:
        return given.shape[1:] == (kind.channels, *latent.shape[2:])
    return given.dim() == 3 and given.shape[2] == kind.channels


def _needed(kind: ConditionKind, latent: Tensor) -> str:
    if kind.channels == 0:
        return "none"
    batch = f"1 or {latent.shape[0]}"
    if kind.on_tokens:
        return f"[{batch}, {kind.channels}, {', '.join(map(str, latent.shape[2:]))}]"
    return f"[{batch}, tokens, {kind.channels}]"
