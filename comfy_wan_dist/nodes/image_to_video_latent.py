"""WanDistImageToVideoLatent: the start latent of a video, its start image encoded in the worker group."""

from __future__ import annotations

import torch
from comfy_api.latest import io
from torch import Tensor

from .. import comfy_adapter, session
from ..group.scheduler import Piece
from ..handle import ModelHandle, resolve_vae
from ..ipc.messages import EncodeRequest
from ..mesh.flops import vae_flops
from .load_model import CATEGORY, WanDistModel
from .vae_decode import vae_dtype_input, vae_name_input

MAX_SIZE = 16384
CHANNELS = 48


class ImageToVideoLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistImageToVideoLatent",
            display_name="Wan Dist Image To Video Latent",
            category=CATEGORY,
            description="An empty Wan2.2 latent, or one that begins with the given images. The same LATENT as "
            "Wan22ImageToVideoLatent with the same VAE.",
            inputs=[
                WanDistModel.Input(
                    "model", tooltip="From Wan Dist Load Model: names the group that encodes."
                ),
                vae_name_input(),
                io.Int.Input(
                    "width",
                    default=1280,
                    min=32,
                    max=MAX_SIZE,
                    step=32,
                    tooltip="Pixels, a multiple of 32.",
                ),
                io.Int.Input(
                    "height",
                    default=704,
                    min=32,
                    max=MAX_SIZE,
                    step=32,
                    tooltip="Pixels, a multiple of 32.",
                ),
                io.Int.Input(
                    "length",
                    default=49,
                    min=1,
                    max=MAX_SIZE,
                    step=4,
                    tooltip="Frames of the video: 1, 5, 9, ... At 24 frames a second 121 are 5 seconds.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Videos to make at once. As in the stock node, it counts only with a start image.",
                ),
                vae_dtype_input(),
                io.Image.Input(
                    "start_image",
                    optional=True,
                    tooltip="First frame, or first 4k+1 frames, of the video; scaled and cropped to its size. "
                    "Without it the video comes from the prompt alone.",
                ),
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
    ) -> io.NodeOutput:
        latent = torch.zeros(1, CHANNELS, (length - 1) // 4 + 1, height // 16, width // 16)
        if start_image is None:
            return io.NodeOutput({"samples": latent})
        count = (min(length, start_image.shape[0]) - 1) // 4 * 4 + 1
        images = comfy_adapter.fit_images(start_image[:count], width=width, height=height)
        planes = session.planes_of(model)
        spec = resolve_vae(
            comfy_adapter.model_path("vae", vae_name), vae_dtype, devices=planes[0].devices
        )
        given = (count - 1) // 4 + 1
        async with session.open_session(planes) as job:
            request = EncodeRequest(
                id=job.id,
                vae=spec,
                frames=job.send(images),
                result=job.reserve((1, CHANNELS, given, *latent.shape[-2:])),
            )
            cost = vae_flops(frames=count, height=height, width=width)
            await job.run([Piece(request=request, cost=cost)])
            latent = comfy_adapter.mean_latent(latent)
            latent[:, :, :given] = job.tensor(request.result)
        mask = torch.ones(1, 1, *latent.shape[-3:])
        mask[:, :, :given] = 0
        repeats = (batch_size, 1, 1, 1, 1)
        return io.NodeOutput(
            {"samples": latent.repeat(repeats), "noise_mask": mask.repeat(repeats)}
        )
