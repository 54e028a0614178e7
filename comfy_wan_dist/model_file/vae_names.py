"""The official names of a Wan2.2 VAE's tensors, from whatever names a file has.

Told from the names alone: official or diffusers, bare or behind a prefix. Other files are refused by what they are.
Source: key tables of the official Wan2.2 VAE and of diffusers' AutoencoderKLWan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from ..ipc.errors import ModelFileError
from ..mesh.vae_shape import TI2V_CHANNELS
from .names import describe

T = TypeVar("T")

# ComfyUI's full checkpoints have the VAE behind one.
PREFIXES = ("", "first_stage_model.", "vae.")
REMEDY = "choose the Wan2.2 VAE, such as wan2.2_vae.safetensors"

# How names begin in one kind of file only.
OFFICIAL_MARK = "decoder.upsamples.0.upsamples."
DIFFUSERS_MARK = "decoder.up_blocks.0.upsampler."
WAN21_MARKS = ("decoder.upsamples.0.residual.", "encoder.down_blocks.0.conv1.")

DIFFUSERS_PATHS = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "conv_in": "conv1",
    "mid_block.resnets.0": "middle.0",
    "mid_block.attentions.0": "middle.1",
    "mid_block.resnets.1": "middle.2",
    "norm_out": "head.0",
    "conv_out": "head.2",
}
RESNET_PATHS = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
LEVEL = re.compile(
    r"(?P<half>encoder|decoder)\.(?P<way>down|up)_blocks\.(?P<level>[0-9]{1,4})"
    r"\.(?:resnets\.(?P<resnet>[0-9]{1,4})|(?:down|up)sampler)\.(?P<rest>.+)"
)
PATH = re.compile(
    rf"(?P<half>(?:encoder\.|decoder\.)?)(?P<path>{'|'.join(map(re.escape, DIFFUSERS_PATHS))})\.(?P<rest>.+)"
)


def official_vae_tensors(tensors: Mapping[str, T], *, label: str) -> dict[str, T]:
    """The VAE's tensors under their official names; what has no place in a VAE keeps its own.

    Raises ModelFileError naming what the file is instead.
    """
    for prefix in PREFIXES:
        bare = {
            name[len(prefix) :]: tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        if any(name.startswith(WAN21_MARKS) for name in bare):
            raise ModelFileError(
                f"{label} is a Wan2.1 VAE (16 latent channels), but Wan2.2 TI2V-5B needs {TI2V_CHANNELS}; {REMEDY}; "
                "for A14B and Wan2.1 take ComfyUI's own VAELoader and VAEDecode"
            )
        if any(name.startswith(OFFICIAL_MARK) for name in bare):
            return bare
        if any(name.startswith(DIFFUSERS_MARK) for name in bare):
            return _renamed(bare, label)
    raise ModelFileError(f"{label} is not a Wan2.2 VAE: {describe(tensors)}; {REMEDY}")


def _renamed(tensors: Mapping[str, T], label: str) -> dict[str, T]:
    # The step from a level to the next comes after its resnets, and all levels of a half have as many of these.
    steps = {"encoder": 0, "decoder": 0}
    for match in filter(None, map(LEVEL.fullmatch, tensors)):
        if match["resnet"] is not None:
            steps[match["half"]] = max(steps[match["half"]], int(match["resnet"]) + 1)
    renamed = {_official_name(name, steps): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        raise ModelFileError(f"{label} holds a tensor under two names; download it again")
    return renamed


def _official_name(name: str, steps: Mapping[str, int]) -> str:
    if match := LEVEL.fullmatch(name):
        levels = f"{match['way']}samples"
        place = match["resnet"] or steps[match["half"]]
        path = f"{match['half']}.{levels}.{match['level']}.{levels}.{place}"
    elif match := PATH.fullmatch(name):
        path = match["half"] + DIFFUSERS_PATHS[match["path"]]
    else:
        return name
    inner, dot, leaf = match["rest"].partition(".")
    return f"{path}.{RESNET_PATHS.get(inner, inner)}{dot}{leaf}"
