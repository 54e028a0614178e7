"""WanDistVAEDecode: from latent to images, in the worker group."""

from __future__ import annotations

import torch
from comfy_api.latest import io

from ..comfyui.folders import list_models, model_path, validate_model_name
from ..comfyui.images import as_image
from ..comfyui.latent import Latent, latent_for_vae
from ..group.scheduler import Piece
from ..ipc.errors import ConfigError
from ..ipc.messages import DecodeRequest
from ..ipc.shared import split_ref
from ..jobs import session
from ..jobs.handle import DTYPES, ModelHandle, resolve_vae
from ..mesh.devices import GIB
from ..mesh.flops import vae_flops
from ..planning.report import job_text
from .load_model import CATEGORY, WanDistModel

MOST_GIB = 10_000
IMAGE_DTYPES = {"float32": torch.float32, "uint8": torch.uint8}


class VAEDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistVAEDecode",
            display_name="Wan Dist VAE Decode",
            category=CATEGORY,
            description="Decode a Wan2.2 latent to images in the model's worker group, without tiles or blending.",
            inputs=[
                WanDistModel.Input(
                    "model", tooltip="From Wan Dist Load Model: names the group that decodes."
                ),
                vae_name_input(),
                io.Latent.Input("samples", tooltip="From Wan Dist Sampler or KSampler."),
                vae_dtype_input(),
                io.Combo.Input(
                    "image_dtype",
                    options=list(IMAGE_DTYPES),
                    default="float32",
                    optional=True,
                    tooltip="What the GPUs write frames as. uint8: rounded to the 256 steps that saved pictures have, "
                    "in a quarter of the memory until all are there and become float32.",
                ),
                memory_input(),
            ],
            outputs=[
                io.Image.Output(display_name="images"),
                io.String.Output(
                    display_name="report",
                    tooltip="How the GPUs shared the frames, the time, the memory, and what they sent to each other, "
                    "as text.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, vae_name: str) -> str | bool:
        return validate_model_name("vae", vae_name)

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        vae_name: str,
        samples: Latent,
        vae_dtype: str,
        image_dtype: str = "float32",
        memory: str = "auto",
    ) -> io.NodeOutput:
        memory_bytes = parse_memory(memory)
        if image_dtype not in IMAGE_DTYPES:
            raise ConfigError(
                f"image_dtype {image_dtype!r} is not offered; choose {', '.join(IMAGE_DTYPES)}"
            )
        planes = session.planes_of(model)
        spec = resolve_vae(model_path("vae", vae_name), vae_dtype, devices=planes[0].devices)
        latent = latent_for_vae(samples)
        batch, _, frames, height, width = latent.shape
        # Videos of a batch go to whichever plane is free.
        sizes = (1,) * batch if len(planes) > 1 else (batch,)
        images = [size * (4 * frames - 3) for size in sizes]
        async with session.open_session(planes) as job:
            result = job.reserve(
                (sum(images), 16 * height, 16 * width, 3), IMAGE_DTYPES[image_dtype]
            )
            parts = zip(job.send_split(latent, sizes), split_ref(result, images), strict=True)
            pieces = [
                Piece(
                    request=DecodeRequest(
                        id=f"{job.id}-{index}",
                        vae=spec,
                        latent=part,
                        result=place,
                        memory_bytes=memory_bytes,
                    ),
                    cost=vae_flops(frames=place.shape[0], height=16 * height, width=16 * width),
                )
                for index, (part, place) in enumerate(parts)
            ]
            outcomes = await job.run(pieces)
            report = "\n\n".join(
                job_text(f"VAE: {outcome.answers[0].note}", outcome.answers) for outcome in outcomes
            )
            return io.NodeOutput(as_image(job.tensor(result)), report)


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


def memory_input() -> io.String.Input:
    return io.String.Input(
        "memory",
        default="auto",
        optional=True,
        tooltip="GiB that the VAE may take on each GPU beside the models there, such as 4.5. To keep to it GPUs share "
        "the frames otherwise, or go over them in exact tiles, which is slower. auto: what is free; then the model "
        "itself may move to the computer's memory meanwhile.",
    )


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
