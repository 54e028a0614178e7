"""One transformer in three implementations, with the same weights, on the same inputs.

Covered: this project's model, diffusers' WanTransformer3DModel and ComfyUI's own WanModel, on the CPU, each in the
form in which its project would run it at that dtype. Not covered: loading from files; weights are made from a seed.
Source of the names: diffusers 0.38 `transformer_wan.py`, ComfyUI 0.3.75 `comfy/ldm/wan/model.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from comfy_wan_dist.mesh.shards import ShardRange
from devtools.checkpoints import transformer_weights
from devtools.comfy_server import find_comfyui
from workers.checkpoint.load import build_model
from workers.model.rope import rope_table
from workers.model.tokens import patchify, token_runs
from workers.model.wan import TextKeysValues, TokenRun, WanModel
from workers.parallel.collectives import AxisGroup
from workers.parallel.plan import parameter_slice

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
TEXT_TOKENS = 512
TIMESTEP = 750.0


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


def make_inputs(workload: Workload, *, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    grid, shape = workload.grid, workload.shape
    return Inputs(
        latent=torch.randn(
            1, shape.in_dim, grid.frames, 2 * grid.rows, 2 * grid.columns, generator=generator
        ),
        context=torch.randn(1, TEXT_TOKENS, shape.text_dim, generator=generator),
    )


def make_weights(workload: Workload) -> dict[str, Tensor]:
    """Seeded float32 weights under their official names."""
    return transformer_weights(workload.shape, seed=1)


class OurForward:
    """Our model's forward over one shard of the tokens; `shard` of a single rank is all of them."""

    def __init__(
        self,
        workload: Workload,
        weights: Mapping[str, Tensor],
        inputs: Inputs,
        *,
        tp: AxisGroup,
        shard: ShardRange,
    ) -> None:
        self.model = _load_ours(workload, weights, tp)
        self._context = inputs.context
        self._tokens = patchify(inputs.latent)[:, shard.start : shard.stop].contiguous()
        self._rope = rope_table(workload.grid, shard.start, shard.stop, device=CPU)
        self._timesteps = torch.full((1, 1), TIMESTEP)
        self._runs: tuple[TokenRun, ...] = token_runs(
            (0,) * workload.grid.frames, workload.grid, shard.start, shard.stop
        )
        self._text: tuple[TextKeysValues, ...] = self.model.encode_text(inputs.context)

    def __call__(self) -> Tensor:
        """One step's forward: the text was encoded before, as in the denoise loop."""
        return self._forward(self._text)

    def with_text(self) -> Tensor:
        """Forward and text encoding, which the other implementations repeat every time."""
        return self._forward(self.model.encode_text(self._context))

    def _forward(self, text: tuple[TextKeysValues, ...]) -> Tensor:
        result: Tensor = self.model(
            self._tokens,
            timesteps_BR=self._timesteps,
            runs=self._runs,
            rope=self._rope,
            text=text,
        )
        return result


def _load_ours(workload: Workload, weights: Mapping[str, Tensor], tp: AxisGroup) -> WanModel:
    model = build_model(workload.shape, tp=tp, dtype=workload.dtype, device=CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = weights[name]
            part = parameter_slice(name, tuple(full.shape), tp_rank=tp.rank, tp_size=tp.size)
            if part is not None:
                full = full.narrow(part.dim, part.start, part.stop - part.start)
            parameter.copy_(full)
    return model


class DiffusersForward:
    """diffusers' model with the parameters in float32 that its loader would keep so."""

    def __init__(self, workload: Workload, weights: Mapping[str, Tensor], inputs: Inputs) -> None:
        from diffusers import WanTransformer3DModel

        shape, dtype = workload.shape, workload.dtype
        with torch.device("meta"):
            model = WanTransformer3DModel(
                num_attention_heads=shape.num_heads,
                attention_head_dim=shape.dim // shape.num_heads,
                in_channels=shape.in_dim,
                out_channels=shape.out_dim,
                text_dim=shape.text_dim,
                freq_dim=shape.freq_dim,
                ffn_dim=shape.ffn_dim,
                num_layers=shape.num_layers,
            )
        kept: list[str] = WanTransformer3DModel._keep_in_fp32_modules
        named = {_diffusers_name(name): tensor for name, tensor in weights.items()}
        state = {
            name: tensor.to(torch.float32 if any(part in name.split(".") for part in kept) else dtype)
            for name, tensor in named.items()
        }
        model.load_state_dict(state, strict=True, assign=True)
        model.rope = type(model.rope)(shape.dim // shape.num_heads, model.config.patch_size, 1024)
        self.model = model.eval()
        self._latent = inputs.latent.to(dtype)
        self._context = inputs.context.to(dtype)
        self._timestep = torch.full((1,), TIMESTEP)

    def __call__(self) -> Tensor:
        (velocity,) = self.model(self._latent, self._timestep, self._context, return_dict=False)
        tensor: Tensor = velocity
        return tensor


class ComfyForward:
    """ComfyUI's model without weight casting and with torch's attention, its faster settings on the CPU."""

    def __init__(self, workload: Workload, weights: Mapping[str, Tensor], inputs: Inputs) -> None:
        operations, model_class = _import_comfyui()
        shape, dtype = workload.shape, workload.dtype
        model: nn.Module = model_class(
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
            dtype=dtype,
            operations=operations,
        )
        model.load_state_dict(dict(weights), strict=True)
        self.model = model.eval()
        self._latent = inputs.latent.to(dtype)
        self._context = inputs.context.to(dtype)
        self._timestep = torch.full((1,), TIMESTEP)

    def __call__(self) -> Tensor:
        tensor: Tensor = self.model(self._latent, self._timestep, self._context)
        return tensor


def _import_comfyui() -> tuple[Any, Any]:
    for folder in (find_comfyui(ROOT), ROOT / "devtools" / "stubs"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    # As `main.py --cpu --use-pytorch-cross-attention` would do; other modules read it when imported.
    from comfy.cli_args import args

    args.cpu = True
    args.use_pytorch_cross_attention = True
    import comfy.ops
    from comfy.ldm.wan.model import WanModel as ComfyWanModel

    return comfy.ops.disable_weight_init, ComfyWanModel


_DIFFUSERS_NAMES = (
    (r"text_embedding\.0", "condition_embedder.text_embedder.linear_1"),
    (r"text_embedding\.2", "condition_embedder.text_embedder.linear_2"),
    (r"time_embedding\.0", "condition_embedder.time_embedder.linear_1"),
    (r"time_embedding\.2", "condition_embedder.time_embedder.linear_2"),
    (r"time_projection\.1", "condition_embedder.time_proj"),
    (r"head\.modulation", "scale_shift_table"),
    (r"head\.head", "proj_out"),
    (r"\.modulation$", ".scale_shift_table"),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.([qkv])\.(weight|bias)$", r".to_\1.\2"),
    (r"\.o\.(weight|bias)$", r".to_out.0.\1"),
    (r"\.norm3\.", ".norm2."),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
)


def _diffusers_name(name: str) -> str:
    for pattern, replacement in _DIFFUSERS_NAMES:
        name = re.sub(pattern, replacement, name)
    return name
