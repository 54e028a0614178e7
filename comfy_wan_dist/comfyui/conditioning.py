"""A CONDITIONING as a job takes it: the text, and the image as the channels that the model sees beside the latent.

Covered: what WanImageToVideo, WanFirstLastFrameToVideo and the like put into it, for models whose input has a mask of 4
channels and a latent of 16 behind the 16 of x. Not covered: control videos, reference images, CLIP images.
Source: ComfyUI 0.3.75, comfy/model_base.py (WAN21.concat_cond). Behaviour only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ipc.errors import ConfigError
from ..mesh.shape import WanShape
from .latent import SamplingTensors, latent_format, resize_latent

MASK_CHANNELS = 4
Conditioning = Sequence[Sequence[Any]]
IMAGE_KEYS = ("concat_latent_image", "concat_mask")
APPLIED = {
    **dict.fromkeys(("area", "mask", "control", "hooks", "gligen", "default", "model_conds")),
    **dict.fromkeys(("time_dim_concat", "context_latents", "noise_concat", "denoise_mask")),
    **dict.fromkeys(("timestep_start", "timestep_end")),
    **dict.fromkeys(("concat_mask_index", "start_percent", "clip_start_percent"), 0),
    **dict.fromkeys(("end_percent", "clip_end_percent"), 1),
}
"""What ComfyUI applies with every model, or with Wan, and the value at which it changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """text [1, S, text_dim], and what the model takes beside it, by name; float32 on the CPU."""

    text: Tensor
    conditions: Mapping[str, Tensor]


def read_prompt(
    conditioning: Conditioning, shape: WanShape, tensors: SamplingTensors, *, label: str
) -> Prompt:
    """The prompt for a job's latent and mask. Raises ConfigError for what the model does not take."""
    takes_image = shape.image_dim > 0
    text = prompt_embedding(
        conditioning, label=label, text_dim=shape.text_dim, takes_image=takes_image
    )
    # As in ComfyUI an image counts where the video is given, unless it has a mask of its own.
    options = {"concat_mask": tensors.mask, **conditioning[0][1]}
    conditions = {}
    if takes_image:
        conditions["image"] = _image_channels(options, shape, tensors.noisy, label=label)
    return Prompt(text=text, conditions=conditions)


def prompt_embedding(
    conditioning: Conditioning, *, label: str, text_dim: int, takes_image: bool = False
) -> Tensor:
    """The one embedding [1, S, text_dim] of a CONDITIONING. Raises ConfigError for what else would change the result.

    takes_image: an image conditioning may come along. Other keys are left out, as ComfyUI does for Wan.
    """
    match conditioning:
        case [[Tensor() as embedding, Mapping() as options, *_]]:
            pass
        case _:
            raise ConfigError(
                f"the {label} conditioning has {len(conditioning)} entries; Wan Dist takes one, an embedding with "
                "options: connect a single CLIPTextEncode and leave out ConditioningCombine and scheduling"
            )
    applied = APPLIED if takes_image else {**APPLIED, **dict.fromkeys(IMAGE_KEYS)}
    extra = [
        key
        for key, neutral in applied.items()
        if (value := options.get(key)) is not None and value != neutral
    ]
    if options.get("strength") == 0:  # of one entry, any other counts alike
        extra.append("strength")
    if extra:
        raise ConfigError(
            f"the {label} conditioning carries {', '.join(extra)}, which Wan Dist does not apply; "
            + ("use an I2V model" if set(extra) <= set(IMAGE_KEYS) else "leave it out")
            + ", or connect the output of CLIPTextEncode directly"
        )
    shape = list(embedding.shape)
    if [*shape[:1], *shape[2:]] != [1, text_dim]:
        raise ConfigError(
            f"the {label} conditioning has shape {shape}; this model needs [1, tokens, {text_dim}]: "
            "encode the prompt with the umT5 text encoder of Wan (CLIPLoader, type wan)"
        )
    if not bool(torch.isfinite(embedding).all()):
        raise ConfigError(
            f"the {label} conditioning holds NaN or infinite values; encode the prompt again"
        )
    return embedding.to("cpu", torch.float32)


def _image_channels(
    options: Mapping[str, Any], shape: WanShape, latent: Tensor, *, label: str
) -> Tensor:
    """Channels [1 or B, 4 + C, T, h, w]. The mask is 1 where the image counts.

    Without an image all of them are 0, as in ComfyUI.
    """
    image, mask = (options.get(key) for key in IMAGE_KEYS)
    if image is None:
        return torch.zeros(1, shape.image_dim, *latent.shape[2:])
    image = _fitted(image, latent, channels=(shape.out_dim,), label=f"{label} image")
    image = latent_format(shape.out_dim).process_in(image)
    if mask is None:
        known = torch.zeros(1, MASK_CHANNELS, *latent.shape[2:])
    else:
        if isinstance(mask, Tensor) and mask.dim() == 5 and mask.shape[1] != MASK_CHANNELS:
            mask = mask.float().mean(dim=1, keepdim=True)
        known = 1 - _fitted(mask, latent, channels=(1, MASK_CHANNELS), label=f"{label} image mask")
        known = known.expand(-1, MASK_CHANNELS, -1, -1, -1)
    batch = max(known.shape[0], image.shape[0])
    return torch.cat([x.expand(batch, -1, -1, -1, -1) for x in (known, image)], dim=1)


def _fitted(x: Any, latent: Tensor, *, channels: tuple[int, ...], label: str) -> Tensor:
    """`x` in the latent's height and width. Raises ConfigError for what is not [1 or B, C, T, *, *] and finite."""
    batch, _, frames, height, width = latent.shape
    is_video = isinstance(x, Tensor) and x.dim() == 5 and 0 not in x.shape
    if (
        not (is_video and x.shape[0] in (1, batch) and x.shape[1] in channels)
        or x.shape[2] != frames
    ):
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(
            f"the {label} has shape {got}; for this latent it must be [1 or {batch}, {channels[-1]}, {frames}, height, "
            "width]: give WanImageToVideo and the latent the same length and batch size"
        )
    fitted = resize_latent(x, height=height, width=width)
    if not bool(torch.isfinite(fitted).all()):
        raise ConfigError(f"the {label} holds NaN or infinite values; encode it again")
    return fitted
