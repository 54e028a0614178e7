"""An IMAGE as ComfyUI has it."""

from __future__ import annotations

import comfy.utils
import torch
from PIL.Image import Image as PILImage
from torch import Tensor

from ..ipc.errors import ConfigError


def fit_images(images: Tensor, *, width: int, height: int, multiple: int) -> Tensor:
    """Images [F, H, W, 3+] as Wan22ImageToVideoLatent encodes them, [F, height, width, 3].

    They are scaled and centre-cropped to the size, then cropped to multiples of `multiple`.
    """
    is_small = min(width, height) < multiple
    if images.dim() != 4 or 0 in images.shape or images.shape[-1] < 3 or is_small:
        raise ConfigError(
            f"the images have shape {list(images.shape)}, the video {width}x{height} pixels; images must be [frames, "
            f"height, width, 3], and a video's sides {multiple} or more"
        )
    scaled = comfy.utils.common_upscale(
        images[..., :3].movedim(-1, 1), width, height, "bilinear", "center"
    )
    for dim, size in ((2, height), (3, width)):
        scaled = scaled.narrow(dim, size % multiple // 2, size - size % multiple)
    fitted: Tensor = scaled.movedim(1, -1).to("cpu", torch.float32).contiguous()
    return fitted


def as_image(frames: Tensor) -> Tensor:
    """Frames in 0..1, or uint8 in 0..255, as an IMAGE; the latter are copied, as LoadImage would have them."""
    return frames if frames.is_floating_point() else frames.float().div_(255)


def image_of(picture: PILImage) -> Tensor:
    """A PIL picture as IMAGE [1, H, W, 3] in 0..1."""
    width, height = picture.size
    pixels = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    return pixels.view(1, height, width, 3).float() / 255
