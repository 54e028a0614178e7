"""What the nodes of the VAE ask for alike: its file, its type, and the memory that it may take."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..comfyui.folders import list_models, model_path, validate_model_name
from ..ipc.errors import ConfigError
from ..jobs.handle import DTYPES, fingerprint
from ..mesh.devices import GIB
from ..model_file.header import read_model_file

MOST_GIB = 10_000


class VAENode(io.ComfyNode):
    """A node whose VAE may have a name that is not listed, and is read again when its file is replaced."""

    @classmethod
    def validate_inputs(cls, vae_name: str | None) -> str | bool:
        return validate_model_name("vae", vae_name)

    @classmethod
    def fingerprint_inputs(cls, vae_name: str | None, **others: Any) -> str:
        if vae_name is None:  # linked
            return ""
        return fingerprint(read_model_file(model_path("vae", vae_name), component="vae"))


def vae_name_input() -> io.Combo.Input:
    return io.Combo.Input(
        "vae_name",
        options=list_models("vae"),
        tooltip="Wan2.2 VAE: file or folder in models/vae, such as wan2.2_vae.safetensors, or folder of diffusers in "
        "models/diffusers.",
    )


def vae_dtype_input() -> io.Combo.Input:
    return io.Combo.Input(
        "vae_dtype",
        options=list(DTYPES),
        default="auto",
        tooltip="Type the VAE computes in. auto: bfloat16 on GPUs, the file's own type on the CPU.",
    )


def memory_input() -> io.String.Input:
    return io.String.Input(
        "memory",
        default="auto",
        optional=True,
        tooltip="GiB that the VAE may take on each GPU beside the models there, such as 4.5. To keep to it GPUs share "
        "the frames otherwise, or go over them in exact tiles, which is slower. auto: what is free; then the model "
        "itself may move to the computer's memory meanwhile.",
    )


def parse_memory(text: str) -> int | None:
    """Bytes of a number of GiB; None for `auto`. Raises ConfigError."""
    if text.strip() == "auto":
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < MOST_GIB:
        raise ConfigError(
            f"memory is {text!r}; it must be auto or a number of GiB, such as 4.5, below {MOST_GIB}"
        )
    return round(gib * GIB)
