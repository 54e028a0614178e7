"""A MODEL whose transformer is elsewhere: ComfyUI's own samplers, guiders and LoRA loaders take it for any other.

ComfyUI keeps what it does around a transformer: sigmas, timesteps by frame, image channels, guidance, batches of
prompts. In its place stands a module without weights, which passes on what it is called with. It names parameters
as if it had them, so that ComfyUI knows which keys of a LoRA file mean what.
Source: ComfyUI 0.3.75, comfy/model_base.py, comfy/model_patcher.py, comfy/ldm/wan/model.py. Behaviour only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.supported_models
import torch
from torch import Tensor, nn

from ..ipc.errors import ConfigError
from ..mesh.parameters import expected_parameters
from ..mesh.shape import PATCH_SIZE, WanShape
from ..mesh.vae_shape import TI2V_CHANNELS
from .patches import PREFIX, CarriedPatches, read_patches

NOT_CARRIED = ("patches", "patches_replace", "optimized_attention_override", "rope_options")
"""What nodes of other packs put into the options of a call to change the inside of a transformer."""
NOT_TAKEN = ("context_latents",)
"""What ComfyUI's own Wan takes beside what it is given by place, since 0.28: latents beside the video's."""


class Predict(Protocol):
    """Predicts for a run of a sampler.

    x [B, in_dim, T, h, w], timesteps [B] or [B, T], text [B, S, text_dim] -> velocity [B, C, T, h, w]; all float32. In
    timesteps 1 may stand for all of B.
    """

    def __call__(self, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor: ...

    def close(self) -> None:
        """The sampler has ended, maybe by an error."""
        ...


OpenRun = Callable[[CarriedPatches], Predict]
"""Called before a sampler's first step, with what is to be merged into the model's weights."""


class HollowModule:
    """A module of which only the size of its weight is known."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_not_there(name))


class RemoteTransformer(nn.Module):
    """Stands where ComfyUI expects Wan's transformer."""

    def __init__(self, shape: WanShape, open_run: OpenRun) -> None:
        super().__init__()
        self.dtype = torch.float32
        # Outside of the module's parameters: what counts, moves or casts these finds none.
        self._hollow = _hollow(shape)
        self.patch_embedding = HollowModule(self._hollow["patch_embedding.weight"])
        self._open_run = open_run
        self._predict: Predict | None = None
        # TorchCompileModel has nothing to compile here; the loader's own option compiles the blocks.
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(_not_there(name)) from error

    def begin(self, patches: CarriedPatches) -> None:
        """A sampler begins."""
        self.end()  # of one that ComfyUI has not ended
        self._predict = self._open_run(patches)

    def end(self) -> None:
        """It has ended, or never begun."""
        if self._predict is not None:
            self._predict.close()
        self._predict = None

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        clip_fea: Tensor | None = None,
        time_dim_concat: Tensor | None = None,
        transformer_options: Mapping[str, Any] = {},  # noqa: B006 - read only; ComfyUI passes it by place
        **others: Any,
    ) -> Tensor:
        wrappers = comfy.patcher_extension.get_all_wrappers(
            comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, transformer_options
        )
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(
            self._forward, self, wrappers
        )
        out: Tensor = executor.execute(
            x, timestep, context, clip_fea, time_dim_concat, transformer_options, **others
        )
        return out

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        clip_fea: Tensor | None = None,
        time_dim_concat: Tensor | None = None,
        transformer_options: Mapping[str, Any] = {},  # noqa: B006
        *,
        control: Any = None,
        **others: Any,
    ) -> Tensor:
        """Like ComfyUI's own Wan it leaves out what the model has no use for, such as clip_fea."""
        refused = [name for name in NOT_CARRIED if transformer_options.get(name)]
        refused += [name for name in NOT_TAKEN if others.get(name) is not None]
        if control is not None:
            refused.append("a ControlNet")
        if time_dim_concat is not None:
            refused.append("time_dim_concat")
        if refused:
            raise ConfigError(
                f"the MODEL of Wan Dist was given {', '.join(refused)}, which needs the transformer in ComfyUI's own "
                "process; leave out the node that applies it, or load the model with a stock loader"
            )
        if self._predict is None:
            raise ConfigError(
                "the MODEL of Wan Dist was called outside of a sampler's run; use KSampler, SamplerCustomAdvanced or "
                "another node that runs one"
            )
        return self._predict(x, timestep, context).to(x.device)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self._hollow.items():
            destination[prefix + name] = tensor


class RemotePatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Has nothing to move or to patch. What is put on it reaches the ranks when a sampler begins."""

    def pre_run(self, *arguments: Any, **options: Any) -> None:
        super().pre_run(*arguments, **options)
        refused = [key for key in self.object_patches if key.startswith(PREFIX)]
        refused += [*self.weight_wrapper_patches, *self.injections]
        if refused:
            raise ConfigError(
                f"the MODEL of Wan Dist was given {', '.join(refused)}, which replaces a part of the transformer in "
                "ComfyUI's own process, where there is none; leave out the node that does it, or load the model with a "
                "stock loader"
            )
        self.model.diffusion_model.begin(read_patches(self))

    def cleanup(self) -> None:
        self.model.diffusion_model.end()
        super().cleanup()

    def patch_hooks(self, hooks: Any) -> None:
        if hooks is not None and self.get_combined_hook_patches(hooks=hooks):
            raise ConfigError(
                "a conditioning carries hooks that change the model's weights on the way, which the MODEL of Wan Dist "
                "does not apply; leave out the hooks, or load the model with a stock loader"
            )
        super().patch_hooks(hooks=hooks)


def build_model(shape: WanShape, open_run: OpenRun) -> RemotePatcher:
    """A MODEL of a transformer's shape."""
    config = _model_config(shape)
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "")
    model.diffusion_model = RemoteTransformer(shape, open_run)
    # What ComfyUI makes room for, or splits batches by.
    model.memory_usage_factor = 0.0
    return RemotePatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=torch.device("cpu"),
        size=1,  # 0 would have it counted
    )


def _model_config(shape: WanShape) -> Any:
    supported = comfy.supported_models
    kind = supported.WAN21_I2V if shape.image_dim else supported.WAN21_T2V
    if shape.out_dim == TI2V_CHANNELS:
        kind = supported.WAN22_T2V
    return kind(
        {
            **kind.unet_config,
            "in_dim": shape.in_dim,
            "out_dim": shape.out_dim,
            "dim": shape.dim,
            "ffn_dim": shape.ffn_dim,
            "num_heads": shape.num_heads,
            "num_layers": shape.num_layers,
            "patch_size": PATCH_SIZE,
            "disable_unet_model_creation": True,
        }
    )


def _not_there(name: str) -> str:
    return (
        f"the MODEL of Wan Dist has no {name!r} in ComfyUI's process, as its transformer runs on the GPUs of the mesh; "
        "leave out the node that reaches for it, or load the model with a stock loader"
    )


def _hollow(shape: WanShape) -> dict[str, Tensor]:
    """The model's parameters by name, without memory."""
    return {
        name: torch.empty(size, device="meta") for name, size in expected_parameters(shape).items()
    }
