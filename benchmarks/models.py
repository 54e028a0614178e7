"""One transformer in three implementations, with the same weights, on the same inputs.

Covered: this project's model, diffusers' WanTransformer3DModel and ComfyUI's own WanModel, on the CPU, each in the
form in which its project would run it at that dtype. Not covered: loading from files; weights are made from a seed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfy_wan_dist.mesh.parameters import parameter_slice
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from devtools import stand_ins
from devtools.comfy_server import find_comfyui, python_of
from devtools.references import build_diffusers_transformer
from workers.parallel.context import apply_context_parallel
from workers.parallel.groups import MeshGroups
from workers.parallel.parallelize import cut_model
from workers.sampling.forward import (
    Forward,
    ForwardInputs,
    PromptTensors,
    build_forward,
    prepare_forward,
)

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
TEXT_TOKENS = 512
TIMESTEP = 750.0
GUIDANCE_SCALE = 5.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model's sizes, the token grid of its input, and the weights' dtype."""

    shape: WanShape
    grid: LatentGrid
    dtype: torch.dtype

    @property
    def label(self) -> str:
        kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return f"{self.grid.tokens} tokens {kind}"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A noisy latent [1, C, T, h, w] and a text embedding [1, S, text_dim], both float32."""

    latent: Tensor
    context: Tensor


def make_inputs(workload: Workload) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    grid, shape = workload.grid, workload.shape
    size = (1, shape.in_dim, grid.frames, 2 * grid.rows, 2 * grid.columns)
    return Inputs(
        latent=torch.randn(size, generator=generator),
        context=torch.randn(1, TEXT_TOKENS, shape.text_dim, generator=generator),
    )


class OurForward:
    """Our model on this rank's share: its shard of the tokens, of the weights, and of the guidance branches.

    With a cfg axis of size 2 a call computes this rank's branch and exchanges the predictions; else it computes
    one branch and no guidance.
    """

    def __init__(
        self,
        workload: Workload,
        weights: Mapping[str, Tensor],
        inputs: Inputs,
        groups: MeshGroups,
    ) -> None:
        self._model = cut_model(workload.shape, groups, dtype=workload.dtype, device=CPU)
        for name, parameter in self._model.named_parameters():
            full = weights[name]
            part = parameter_slice(
                name, tuple(full.shape), tp_rank=groups.tp.rank, tp_size=groups.tp.size
            )
            if part is not None:
                full = full.narrow(part.dim, part.start, part.stop - part.start)
            parameter.copy_(full)
        prompt = PromptTensors(text=inputs.context, conditions={})
        self._guidance = GUIDANCE_SCALE if groups.cfg.size == 2 else None
        given = ForwardInputs(
            latent=inputs.latent, cond=prompt, uncond=None if self._guidance is None else prompt
        )
        self._inputs = prepare_forward(given, workload.shape, groups, CPU)
        apply_context_parallel(self._model, groups, self._inputs.shards.cp)
        self._x = self._inputs.shard(inputs.latent)
        self._forward = self._build()

    def __call__(self) -> Tensor:
        """One forward of a step, [1, L_local, P]; the text was encoded before, as in the denoise loop."""
        return self._forward.predict(self._x, TIMESTEP)

    def with_text(self) -> Tensor:
        """The same with the text encoded anew, as the other implementations do in every forward."""
        return self._build().predict(self._x, TIMESTEP)

    def _build(self) -> Forward:
        return build_forward(self._model, self._inputs, guidance=self._guidance)


class DiffusersForward:
    """diffusers' model, with those parameters in float32 that its loader keeps so."""

    def __init__(self, workload: Workload, weights: Mapping[str, Tensor], inputs: Inputs) -> None:
        self.model = build_diffusers_transformer(workload.shape, weights)
        kept: list[str] = self.model._keep_in_fp32_modules
        for name, parameter in self.model.named_parameters():
            if not set(kept) & set(name.split(".")):
                parameter.data = parameter.data.to(workload.dtype)
        self._latent = inputs.latent.to(workload.dtype)
        self._context = inputs.context.to(workload.dtype)
        self._timestep = torch.full((1,), TIMESTEP)

    def __call__(self) -> Tensor:
        velocity: Tensor = self.model(
            self._latent, self._timestep, self._context, return_dict=False
        )[0]
        return velocity


class ComfyForward:
    """ComfyUI's model without weight casting and with torch's attention: its fastest settings on the CPU."""

    def __init__(self, workload: Workload, weights: Mapping[str, Tensor], inputs: Inputs) -> None:
        operations, model_class = _import_comfyui()
        shape = workload.shape
        self._model = model_class(
            model_type="t2v",
            in_dim=shape.in_dim,
            out_dim=shape.out_dim,
            dim=shape.dim,
            ffn_dim=shape.ffn_dim,
            freq_dim=shape.freq_dim,
            text_dim=shape.text_dim,
            num_heads=shape.num_heads,
            num_layers=shape.num_layers,
            device=CPU,
            dtype=workload.dtype,
            operations=operations,
        ).eval()
        self._model.load_state_dict(weights)
        self._latent = inputs.latent.to(workload.dtype)
        self._context = inputs.context.to(workload.dtype)
        self._timestep = torch.full((1,), TIMESTEP)

    def __call__(self) -> Tensor:
        velocity: Tensor = self._model(self._latent, self._timestep, self._context)
        return velocity


def use_comfyui() -> None:
    """Make ComfyUI's modules importable, set as by `--cpu --use-pytorch-cross-attention`."""
    comfyui = find_comfyui(ROOT)
    if str(comfyui) not in sys.path:
        # What it needs beyond this environment lies in its own.
        own = Path(python_of(comfyui)).parents[1].glob("lib/python*/site-packages")
        sys.path += map(str, (comfyui, *own))
        stand_ins.install()
    from comfy.cli_args import args

    # Before other modules are imported: they read these when they are.
    args.cpu = True
    args.use_pytorch_cross_attention = True


def _import_comfyui() -> tuple[Any, Any]:
    """ComfyUI's plain operations and its Wan model class."""
    use_comfyui()
    import comfy.ops
    from comfy.ldm.wan.model import WanModel as ComfyWanModel

    return comfy.ops.disable_weight_init, ComfyWanModel
