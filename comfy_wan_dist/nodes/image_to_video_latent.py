"""WanDistImageToVideoLatent: the start latent of a video, its first and last frames encoded in the worker group.

What is at the start equals the stock node's. What is at the end has no stock counterpart: a latent frame after the
first stands for four frames and is encoded with those before it, so the end is encoded as a video of its own, and the
latent frame of its first image, which would stand for one frame only, is left out.
"""

from __future__ import annotations

import torch
from comfy_api.latest import io
from torch import Tensor

from ..comfyui.folders import model_path, validate_model_name
from ..comfyui.images import fit_images
from ..comfyui.latent import mean_latent
from ..group.scheduler import Piece
from ..ipc.errors import ConfigError
from ..ipc.messages import EncodeRequest, VAESpec
from ..jobs import session
from ..jobs.handle import ModelHandle, resolve_vae
from ..mesh.flops import vae_flops
from ..mesh.shape import TI2V_CHANNELS
from .load_model import CATEGORY, WanDistModel
from .vae_decode import memory_input, parse_memory, vae_dtype_input, vae_name_input

MAX_SIZE = 16384


class ImageToVideoLatent(io.ComfyNode):
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
    def validate_inputs(cls, vae_name: str) -> str | bool:
        return validate_model_name("vae", vae_name)

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
        memory_bytes = parse_memory(memory)
        latent = torch.zeros(1, TI2V_CHANNELS, latent_frames(length), height // 16, width // 16)
        if start_image is None and end_image is None:
            return io.NodeOutput({"samples": latent})
        start = None if start_image is None else first_frames(start_image, length)
        end = None if end_image is None else last_frames(end_image)
        validate_room(start, end, frames=latent.shape[2])
        planes = session.planes_of(model)
        spec = resolve_vae(model_path("vae", vae_name), vae_dtype, devices=planes[0].devices)
        latent = mean_latent(latent)
        mask = torch.ones(1, 1, *latent.shape[-3:])

        async def encode(images: Tensor, name: str) -> Tensor:
            images = fit_images(images, width=width, height=height)
            return await encode_images(
                job, f"{job.id}-{name}", spec, images, memory_bytes=memory_bytes
            )

        async with session.open_session(planes) as job:
            if start is not None:
                encoded = await encode(start, "start")
                given = encoded.shape[2]
                latent[:, :, :given], mask[:, :, :given] = encoded, 0
            if end is not None:
                encoded = (await encode(end, "end"))[:, :, 1:]
                given = encoded.shape[2]
                latent[:, :, -given:], mask[:, :, -given:] = encoded, 0
        repeats = (batch_size, 1, 1, 1, 1)
        return io.NodeOutput(
            {"samples": latent.repeat(repeats), "noise_mask": mask.repeat(repeats)}
        )


async def encode_images(
    job: session.Session, id: str, vae: VAESpec, images: Tensor, *, memory_bytes: int | None
) -> Tensor:
    """Images [4k+1, H, W, 3] as a raw latent [1, C, k+1, H/16, W/16]."""
    frames, height, width, _ = images.shape
    request = EncodeRequest(
        id=id,
        vae=vae,
        frames=job.send(images),
        result=job.reserve((1, TI2V_CHANNELS, latent_frames(frames), height // 16, width // 16)),
        memory_bytes=memory_bytes,
    )
    cost = vae_flops(frames=frames, height=height, width=width)
    await job.run([Piece(request=request, cost=cost)])
    return job.tensor(request.result)


def latent_frames(frames: int) -> int:
    """How many latent frames stand for the first 4k+1 of `frames`."""
    return (frames - 1) // 4 + 1


def first_frames(images: Tensor, length: int) -> Tensor:
    """The first 4k+1 of images [F, ...], no more than `length`."""
    return images[: 4 * latent_frames(min(length, images.shape[0])) - 3]


def last_frames(images: Tensor) -> Tensor:
    """The last 4k of images [F, ...] behind one that leads to them; the first is repeated where there are too few."""
    count = 4 * max(1, images.shape[0] // 4) + 1
    missing = max(0, count - images.shape[0])
    return torch.cat([images[:1].expand(missing, *images.shape[1:]), images[-count:]])


def validate_room(start: Tensor | None, end: Tensor | None, *, frames: int) -> None:
    """Refuse an end that does not fit behind the start, or behind the first of the latent's `frames`. ConfigError."""
    if end is None:
        return
    first = 1 if start is None else latent_frames(start.shape[0])
    last = latent_frames(end.shape[0]) - 1
    if first + last > frames:
        raise ConfigError(
            f"the end image needs {4 * last} frames and the start {4 * first - 3}, but the video has {4 * frames - 3}; "
            f"choose a length of {4 * (first + last) - 3} or more, or give fewer images"
        )
