"""Pipeline parallelism: each stage holds a run of blocks and passes the residual on.

Micro-batches are the two guidance branches and the samples of a batch. Blocks keep their global names. Only the first
stage embeds patches, only the last one has the head; its predictions go to all stages, which then take the solver's
step alike, so that nothing else needs to travel.
Source: GPipe (arXiv 1811.06965), forward only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from comfy_wan_dist.mesh.parameters import OUTER, stage_blocks
from workers.model.wan import TextKeysValues, TokenRun, WanModel

from .collectives import AxisGroup


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward of one sample or of several: tokens [B, L, P], timesteps [B, R], the blocks' text, conditions."""

    tokens: Tensor
    timesteps: Tensor
    text: tuple[TextKeysValues, ...]
    conditions: Mapping[str, Tensor] = field(default_factory=dict)


def select_stage(model: WanModel, pp: AxisGroup) -> None:
    """Keep what this stage computes. Call it on the meta device, before anything else is applied."""
    own = stage_blocks(model.shape.num_layers, stages=pp.size, stage=pp.rank)
    for index in range(model.shape.num_layers):
        if not own.start <= index < own.stop:
            del model.blocks[str(index)]
    for each in OUTER:
        module = each.name.partition(".")[0]
        if hasattr(model, module) and not each.stage.includes(pp.rank, stages=pp.size):
            delattr(model, module)


def forward_in_stages(
    model: WanModel,
    batches: Sequence[MicroBatch],
    *,
    runs: tuple[TokenRun, ...],
    rope: Tensor,
    pp: AxisGroup,
) -> list[Tensor]:
    """Velocity [B, L, P] float32 of every micro-batch, on every stage.

    Collectives on pp: one transfer of the residual per micro-batch and boundary, one broadcast of the predictions.
    """
    if pp.size == 1:
        return [
            model(
                batch.tokens,
                timesteps_BR=batch.timesteps,
                runs=runs,
                rope=rope,
                text=batch.text,
                conditions=batch.conditions,
            )
            for batch in batches
        ]
    is_first, is_last = pp.rank == 0, pp.rank == pp.size - 1
    outputs = []
    leaving = []
    for batch in batches:
        time = model.embed_time(batch.timesteps)
        if is_first:
            x = model.embed_patches(batch.tokens, batch.conditions)
        else:
            size = (*batch.tokens.shape[:2], model.shape.dim)
            x = torch.empty(size, dtype=model.dtype, device=batch.tokens.device)
            pp.receive(x, pp.rank - 1)
        x = model.run_blocks(x, time, runs, rope, batch.text)
        if is_last:
            outputs.append(model.head(x, time.head, runs))
        else:
            leaving.append(pp.send(x, pp.rank + 1))
    for transfer in leaving:
        transfer.wait()
    tokens = batches[0].tokens
    size = (len(batches), *tokens.shape[:2], model.shape.token_dim)
    whole = torch.stack(outputs) if is_last else tokens.new_empty(size)
    return list(pp.broadcast(whole, pp.size - 1))
