"""WanDistVAEDecode: from latent to images, in the worker group."""

from __future__ import annotations

import torch
from comfy_api.latest import io

from ..comfyui.images import as_image
from ..comfyui.latent import Latent
from ..ipc.errors import ConfigError
from ..jobs.handle import ModelHandle
from ..jobs.vae import decode_latent
from .inputs import CATEGORY, WanDistModel, validate_types
from .vae_inputs import VAENode, memory_input, parse_memory, vae_dtype_input, vae_name_input

IMAGE_DTYPES = {"float32": torch.float32, "uint8": torch.uint8}


class VAEDecode(VAENode):
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
    async def execute(
        cls,
        model: ModelHandle,
        vae_name: str,
        samples: Latent,
        vae_dtype: str,
        image_dtype: str = "float32",
        memory: str = "auto",
    ) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        memory_bytes = parse_memory(memory)
        if image_dtype not in IMAGE_DTYPES:
            raise ConfigError(
                f"image_dtype {image_dtype!r} is not offered; choose {', '.join(IMAGE_DTYPES)}"
            )
        images, report = await decode_latent(
            model,
            vae_name,
            samples,
            vae_dtype=vae_dtype,
            image_dtype=IMAGE_DTYPES[image_dtype],
            memory_bytes=memory_bytes,
        )
        return io.NodeOutput(as_image(images), report)
