"""Nodes for tests and parity, to be linked into a ComfyUI beside the pack: what goes through a graph, as files.

Covered: saving a LATENT with its mask, or IMAGEs, in full precision; a VAE of ComfyUI's own for a file of toy size,
whose widths the stock loader takes for granted, and one without a file; SIGMAS of any content; values as links;
more in a CONDITIONING; a scheduler that comes late; a MODEL whose calls are counted.
Nothing of this project is imported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.samplers
import comfy.sd
import comfy.utils
import folder_paths
import node_helpers
import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor


class SaveTensors:
    """Write `samples`, `noise_mask` and `images`, as far as there, to one safetensors file in the output folder."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802, ComfyUI's name
        return {"required": {}, "optional": {"latent": ("LATENT",), "images": ("IMAGE",)}}

    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True
    CATEGORY = "test"

    def save(
        self, latent: dict[str, Any] | None = None, images: Tensor | None = None
    ) -> dict[str, Any]:
        tensors = {k: v for k, v in (latent or {}).items() if isinstance(v, Tensor)}
        if images is not None:
            tensors["images"] = images
        folder, stem, counter, subfolder, _ = folder_paths.get_save_image_path(
            "tensors", folder_paths.get_output_directory()
        )
        name = f"{stem}_{counter:05}_.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, Path(folder) / name)
        return {"ui": {"tensors": [{"filename": name, "subfolder": subfolder, "type": "output"}]}}


def small_vae(module: Any, weights: dict[str, Tensor], **widths: int) -> tuple[Any]:
    """The object that VAELoader makes, around ComfyUI's own network in `module`, in other widths than it takes for
    granted."""
    stock = module.WanVAE
    module.WanVAE = lambda **config: stock(**{**config, **widths})
    try:
        return (comfy.sd.VAE(sd=weights),)
    finally:
        module.WanVAE = stock


class SmallVAELoader:
    """`small_vae` of a file of the Wan2.2 VAE, in the file's widths."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"vae_name": (folder_paths.get_filename_list("vae"),)}}

    RETURN_TYPES = ("VAE",)
    FUNCTION = "load"
    CATEGORY = "test"

    def load(self, vae_name: str) -> tuple[Any]:
        weights = comfy.utils.load_torch_file(folder_paths.get_full_path_or_raise("vae", vae_name))
        return small_vae(
            comfy.ldm.wan.vae2_2,
            weights,
            dim=weights["encoder.conv1.weight"].shape[0],
            dec_dim=weights["decoder.head.2.weight"].shape[1],
        )


class GivenSigmas:
    """SIGMAS from text, however wrong; `dims` leading dims of 1 are put before it."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"values": ("STRING",), "dims": ("INT", {"default": 0})}}

    RETURN_TYPES = ("SIGMAS",)
    FUNCTION = "give"
    CATEGORY = "test"

    def give(self, values: str, dims: int) -> tuple[Tensor]:
        sigmas = torch.tensor([float(value) for value in values.split(",") if value])
        return (sigmas.reshape(*(1,) * dims, -1),)


class AnyType(str):
    """As packs with switches spell a type that goes with every other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class LinkedValue:
    """A value from JSON, for inputs that are widgets otherwise: of any type, and as a choice. `numpy`: in 32 bits."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"value": ("STRING",)}}

    RETURN_TYPES = (AnyType("*"), "COMBO")
    FUNCTION = "give"
    CATEGORY = "test"

    def give(self, value: str) -> tuple[Any, Any]:
        if value.startswith("numpy "):
            return (numpy.float32(value.removeprefix("numpy ")),) * 2
        return (json.loads(value),) * 2


class TakeAny:
    """An end for a graph whose last node gives a value of any type."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"value": (AnyType("*"),)}}

    RETURN_TYPES = ()
    FUNCTION = "take"
    OUTPUT_NODE = True
    CATEGORY = "test"

    def take(self, value: object) -> dict[str, Any]:
        return {}


class MoreLatent:
    """A LATENT with one key more, from JSON; `dtype` is that of its samples then."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        text = ("STRING",)
        return {"required": {"latent": ("LATENT",), "key": text, "value": text}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "add"
    CATEGORY = "test"

    def add(self, latent: dict[str, Any], key: str, value: str) -> tuple[Any]:
        if key == "dtype":
            return ({**latent, "samples": latent["samples"].to(getattr(torch, value))},)
        return ({**latent, key: json.loads(value)},)


class MoreConditioning:
    """A CONDITIONING with one key more, from JSON; `clip` is what a CLIP vision encoder gives, `drop` is without it,
    and `twice` gives the text two samples."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        text = ("STRING",)
        return {"required": {"conditioning": ("CONDITIONING",), "key": text, "value": text}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "add"
    CATEGORY = "test"

    def add(self, conditioning: Any, key: str, value: str) -> tuple[Any]:
        if value == "drop":
            return (
                [
                    [text, {k: v for k, v in more.items() if k != key}]
                    for text, more in conditioning
                ],
            )
        if value == "twice":
            return ([[torch.cat([text, text]), more] for text, more in conditioning],)
        states = torch.randn(1, 257, 1280, generator=torch.Generator().manual_seed(5))
        clip = SimpleNamespace(penultimate_hidden_states=states)
        given = clip if value == "clip" else json.loads(value)
        return (node_helpers.conditioning_set_values(conditioning, {key: given}),)


class LateScheduler:
    """A scheduler that other packs' nodes know nothing of when they are loaded; it divides by zero at one step."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"name": ("STRING",)}}

    RETURN_TYPES = ()
    FUNCTION = "register"
    OUTPUT_NODE = True
    CATEGORY = "test"

    def register(self, name: str) -> dict[str, Any]:
        def sigmas(model_sampling: Any, steps: int) -> Tensor:
            top = float(model_sampling.sigma_max)
            falling = [top * (1 - 0.9 * index / (steps - 1)) ** 2 for index in range(steps)]
            return torch.tensor([*falling, 0.0])

        comfy.samplers.SCHEDULER_HANDLERS[name] = comfy.samplers.SchedulerHandler(sigmas)
        if name not in comfy.samplers.KSampler.SCHEDULERS:
            # Not in place: some packs do it like this.
            comfy.samplers.KSampler.SCHEDULERS = [*comfy.samplers.KSampler.SCHEDULERS, name]
        return {}


class CountCalls:
    """A MODEL that writes a line to the log for each call of it, with the name that it was given."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"model": ("MODEL",), "name": ("STRING",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "give"
    CATEGORY = "test"

    def give(self, model: Any, name: str) -> tuple[Any]:
        def call(apply_model: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
            logging.info("a call of %s", name)
            return apply_model(given["input"], given["timestep"], **given["c"])

        model = model.clone()
        model.set_model_unet_function_wrapper(call)
        return (model,)


class OneTimestep:
    """A MODEL whose transformer is handed one timestep for all samples of a call."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "give"
    CATEGORY = "test"

    def give(self, model: Any) -> tuple[Any]:
        def call(forward: Any, x: Tensor, timestep: Tensor, *others: Any, **named: Any) -> Any:
            return forward(x, timestep[:1], *others, **named)

        model = model.clone()
        model.add_wrapper_with_key("diffusion_model", "one timestep", call)
        return (model,)


class RandomVAE:
    """A small VAE of ComfyUI's own with 16 latent channels and seeded weights: stock nodes encode images with it."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {}}

    RETURN_TYPES = ("VAE",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self) -> tuple[Any]:
        network = comfy.ldm.wan.vae.WanVAE(
            dim=8, z_dim=16, attn_scales=[], temperal_downsample=[False, True, True]
        )
        generator = torch.Generator().manual_seed(12)
        weights = {
            name: torch.randn(value.shape, generator=generator) * value[0].numel() ** -0.5
            for name, value in network.state_dict().items()
        }
        return small_vae(comfy.ldm.wan.vae, weights, dim=8)


NODE_CLASS_MAPPINGS = {
    "SaveTensors": SaveTensors,
    "SmallVAELoader": SmallVAELoader,
    "GivenSigmas": GivenSigmas,
    "LinkedValue": LinkedValue,
    "TakeAny": TakeAny,
    "MoreLatent": MoreLatent,
    "MoreConditioning": MoreConditioning,
    "LateScheduler": LateScheduler,
    "CountCalls": CountCalls,
    "OneTimestep": OneTimestep,
    "RandomVAE": RandomVAE,
}
