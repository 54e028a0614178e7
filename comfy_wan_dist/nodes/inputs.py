"""What several nodes ask for alike: a model, a size, a guidance scale."""

from __future__ import annotations

from comfy_api.latest import io

from ..mesh.shape import PATCH_SIZE
from ..mesh.vae_shape import VAE_STRIDE

WanDistModel = io.Custom("WAN_DIST_MODEL")
CATEGORY = "Wan Dist"
PIXELS = VAE_STRIDE * PATCH_SIZE[-1]
"""Height and width of a token."""
MAX_SIZE = 16384


def size_inputs(tooltip: str) -> list[io.Input]:
    """Width and height of a video in pixels."""
    return [
        io.Int.Input(name, default=default, min=PIXELS, max=MAX_SIZE, step=PIXELS, tooltip=tooltip)
        for name, default in (("width", 1280), ("height", 704))
    ]


def cfg_input(
    tooltip: str, *, name: str = "cfg", default: float = 5.0, optional: bool = False
) -> io.Float.Input:
    return io.Float.Input(
        name,
        default=default,
        min=0.0,
        max=100.0,
        step=0.1,
        round=0.01,
        optional=optional,
        tooltip=tooltip,
    )
