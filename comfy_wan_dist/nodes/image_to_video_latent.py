"""WanDistImageToVideoLatent: the start latent of a video, its first and last frames encoded in the worker group."""

from __future__ import annotations

from comfy_api.latest import io
from torch import Tensor

from ..ipc.errors import ConfigError
from ..jobs.handle import ModelHandle
from ..jobs.vae import start_latent
from ..mesh.vae_shape import FRAME_STRIDE, VAE_STRIDE
from .inputs import CATEGORY, MAX_SIZE, PIXELS, WanDistModel, size_inputs, validate_types
from .vae_inputs import VAENode, memory_input, parse_memory, vae_dtype_input, vae_name_input


class ImageToVideoLatent(VAENode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistImageToVideoLatent",
            display_name="Wan Dist Image To Video Latent",
            category=CATEGORY,
            description="An empty Wan2.2 latent, or one that begins or ends with the given images. Without an end "
            "image the same LATENT as Wan22ImageToVideoLatent with the same VAE.",
            inputs=[
                WanDistModel.Input(
                    "model", tooltip="From Wan Dist Load Model: names the group that encodes."
                ),
                vae_name_input(),
                *size_inputs(
                    f"Pixels, best multiples of {PIXELS}; of others whole multiples of {VAE_STRIDE} are taken, as by "
                    "the stock node."
                ),
                io.Int.Input(
                    "length",
                    default=49,
                    min=1,
                    max=MAX_SIZE,
                    step=FRAME_STRIDE,
                    tooltip="Frames of the video: 1, 5, 9, ... At 24 frames a second 121 are 5 seconds.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Videos to make at once. As in the stock node, it counts only with an image.",
                ),
                vae_dtype_input(),
                io.Image.Input(
                    "start_image",
                    optional=True,
                    tooltip="First frame of the video, or the frames to continue, of which the first 4k+1 are taken; "
                    "scaled and cropped to its size. Without it the video comes from the prompt alone.",
                ),
                io.Image.Input(
                    "end_image",
                    optional=True,
                    tooltip="Beyond the stock node: what the last 4 frames show, or of several images the last 4k; "
                    "scaled and cropped. Their latent frames are given like those of the start: the sampler keeps "
                    "them and takes them as free of noise. Wan2.2 was trained with a given start only.",
                ),
                memory_input(),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        vae_name: str,
        width: int,
        height: int,
        length: int,
        batch_size: int,
        vae_dtype: str,
        start_image: Tensor | None = None,
        end_image: Tensor | None = None,
        memory: str = "auto",
    ) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        sizes = (width, height, length, batch_size)
        if not 1 <= min(sizes) <= max(sizes) <= MAX_SIZE:
            raise ConfigError(
                f"width, height, length and batch_size are {sizes}; each must be from 1 to {MAX_SIZE}"
            )
        latent = await start_latent(
            model,
            vae_name,
            vae_dtype=vae_dtype,
            width=width,
            height=height,
            length=length,
            batch_size=batch_size,
            start_image=start_image,
            end_image=end_image,
            memory_bytes=parse_memory(memory),
        )
        return io.NodeOutput(latent)
