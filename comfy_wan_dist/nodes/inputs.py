"""What several nodes ask for alike: a model, a size, a guidance scale; and that a link brings what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from comfy_api.latest import io

from ..ipc.errors import ConfigError
from ..mesh.shape import PATCH_SIZE
from ..mesh.vae_shape import VAE_STRIDE

WanDistModel = io.Custom("WAN_DIST_MODEL")
CATEGORY = "Wan Dist"
PIXELS = VAE_STRIDE * PATCH_SIZE[-1]
"""Height and width of a token."""
MAX_SIZE = 16384
_NUMBERS: dict[Any, Any] = {int: Integral, float: Real}
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


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


def validate_types(execute: Callable[..., Any], types: Mapping[str, type]) -> None:
    """Refuse values of other types than a node's `execute` names. Raises ConfigError.

    ComfyUI looks at what a widget says, and hands on from a link whatever comes.
    """
    for name, hint in get_type_hints(execute).items():
        if hint is Any or name not in types:
            continue
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        allowed = tuple(_NUMBERS.get(kind) or get_origin(kind) or kind for kind in kinds)
        if not issubclass(types[name], allowed):
            needed = " or ".join(_WORDS.get(kind, kind.__name__) for kind in kinds)
            raise ConfigError(
                f"{name} is of type {types[name].__name__}; it must be {needed}: look at what is linked to it"
            )
