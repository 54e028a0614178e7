"""What the VAE does in worker groups: latents decoded to images, images encoded to the latent a video starts from.

What is given at a video's start equals the stock node's. What is at the end has no stock counterpart: a latent frame
after the first stands for four frames and is encoded with those before it, so the end is encoded as a video of its own,
and the latent frame of its first image, which would stand for one frame only, is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comfyui.folders import model_path
from ..comfyui.images import fit_images
from ..comfyui.latent import Latent, latent_for_vae, mean_latent
from ..group.queue import Piece
from ..ipc.errors import ConfigError
from ..ipc.messages import DecodeRequest, EncodeRequest
from ..ipc.shared import split_ref
from ..mesh.flops import vae_flops
from ..mesh.report import job_text
from ..mesh.vae_shape import FRAME_STRIDE, TI2V_CHANNELS, VAE_STRIDE, latent_frames, pixel_frames
from .handle import ModelHandle, resolve_vae
from .session import open_session, planes_of


async def decode_latent(
    model: ModelHandle,
    vae_name: str,
    samples: Latent,
    *,
    vae_dtype: str,
    image_dtype: torch.dtype,
    memory_bytes: int | None,
) -> tuple[Tensor, str]:
    """Images [B * (4T-3), 16h, 16w, 3] in 0..1, or in 0..255 as uint8, and a report on how the ranks shared the work.

    memory_bytes: what the VAE may take on a rank; None for what is free.
    Raises ConfigError, ModelFileError, MeshError, and what the ranks raise.
    """
    planes = planes_of(model)
    vae = resolve_vae(model_path("vae", vae_name), vae_dtype, devices=planes[0].devices)
    latent = latent_for_vae(samples)
    batch, _, frames, rows, columns = latent.shape
    height, width = VAE_STRIDE * rows, VAE_STRIDE * columns
    # Videos of a batch go to whichever plane is free.
    sizes = (1,) * batch if len(planes) > 1 else (batch,)
    images = [size * pixel_frames(frames) for size in sizes]
    with open_session(planes) as session:
        result = session.reserve((sum(images), height, width, 3), image_dtype)
        parts = zip(session.send_split(latent, sizes), split_ref(result, images), strict=True)
        pieces = [
            Piece(
                request=DecodeRequest(
                    id=f"{session.id}-{index}",
                    vae=vae,
                    latent=part,
                    result=place,
                    memory_bytes=memory_bytes,
                ),
                cost=vae_flops(frames=place.shape[0], height=height, width=width),
            )
            for index, (part, place) in enumerate(parts)
        ]
        outcomes = await session.run(pieces)
        report = "\n\n".join(
            job_text(f"VAE: {outcome.answers[0].note}", outcome.answers) for outcome in outcomes
        )
        return session.tensor(result), report


async def start_latent(
    model: ModelHandle,
    vae_name: str,
    *,
    vae_dtype: str,
    width: int,
    height: int,
    length: int,
    batch_size: int,
    start_image: Tensor | None,
    end_image: Tensor | None,
    memory_bytes: int | None,
) -> Latent:
    """A LATENT for videos of so many pixels and frames, with a mask that keeps what the images [F, H, W, 3+] give.

    memory_bytes: what the VAE may take on a rank; None for what is free.
    Raises ConfigError, ModelFileError, MeshError, and what the ranks raise.
    """
    latent = torch.zeros(latent_shape(frames=length, height=height, width=width))
    if start_image is None and end_image is None:
        return {"samples": latent}
    start = None if start_image is None else first_frames(start_image, length)
    end = None if end_image is None else last_frames(end_image)
    validate_room(start, end, frames=latent.shape[2])
    planes = planes_of(model)
    vae = resolve_vae(model_path("vae", vae_name), vae_dtype, devices=planes[0].devices)
    latent = mean_latent(latent)
    mask = torch.ones(1, 1, *latent.shape[2:])
    with open_session(planes) as session:

        async def encode(images: Tensor, name: str) -> Tensor:
            images = fit_images(images, width=width, height=height, multiple=VAE_STRIDE)
            size = dict(zip(("frames", "height", "width"), images.shape, strict=False))
            request = EncodeRequest(
                id=f"{session.id}-{name}",
                vae=vae,
                frames=session.send(images),
                result=session.reserve(latent_shape(**size)),
                memory_bytes=memory_bytes,
            )
            await session.run([Piece(request=request, cost=vae_flops(**size))])
            return session.tensor(request.result)

        if start is not None:
            encoded = await encode(start, "start")
            given = encoded.shape[2]
            latent[:, :, :given], mask[:, :, :given] = encoded, 0
        if end is not None:
            encoded = (await encode(end, "end"))[:, :, 1:]
            given = encoded.shape[2]
            latent[:, :, -given:], mask[:, :, -given:] = encoded, 0
    repeats = (batch_size, 1, 1, 1, 1)
    return {"samples": latent.repeat(repeats), "noise_mask": mask.repeat(repeats)}


def latent_shape(*, frames: int, height: int, width: int) -> tuple[int, int, int, int, int]:
    """[1, C, T, h, w] of one video of so many pixels and frames."""
    return 1, TI2V_CHANNELS, latent_frames(frames), height // VAE_STRIDE, width // VAE_STRIDE


def first_frames(images: Tensor, length: int) -> Tensor:
    """The first 4k+1 of images [F, ...], no more than `length`."""
    return images[: pixel_frames(latent_frames(min(length, images.shape[0])))]


def last_frames(images: Tensor) -> Tensor:
    """The last 4k of images [F, ...] behind one that leads to them; the first is repeated where there are too few."""
    count = FRAME_STRIDE * max(1, images.shape[0] // FRAME_STRIDE) + 1
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
            f"the end image needs {FRAME_STRIDE * last} frames and the start {pixel_frames(first)}, but the video has "
            f"{pixel_frames(frames)}; choose a length of {pixel_frames(first + last)} or more, or give fewer images"
        )
