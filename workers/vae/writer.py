"""Decoded pictures on their way from the device into the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Made:
    """Decoded pictures [F, H, W, 3] from -1 to 1, on the device, and their place in the result."""

    pictures: Tensor
    place: Tensor


class Writer(Protocol):
    """Takes pictures as they are made. Whoever puts some must call `finish` after the last ones."""

    def put(self, made: Made | None, done: int) -> int:
        """Write, now or later. `done` says how far the work is; what is returned, how far the result is."""
        ...

    def finish(self) -> Iterator[int]:
        """Write what is left, step by step; yields how far the result is."""
        ...


class DirectWriter:
    """Writes at once."""

    def put(self, made: Made | None, done: int) -> int:
        if made is not None:
            made.place.copy_(as_pixels(made.pictures, made.place.dtype))
        return done

    def finish(self) -> Iterator[int]:
        return iter(())


Leaving = tuple[Tensor, Callable[[], None]]
"""Where a tensor will be in host memory, and how to wait until it is there."""


class LateWriter:
    """Writes the pictures of one step while the device works on the next.

    leave: begins to bring a device's tensor to the host; called again only after the last one was waited for.
    """

    def __init__(self, leave: Callable[[Tensor], Leaving]) -> None:
        self._leave = leave
        self._pending: tuple[Leaving, Tensor] | None = None
        self._done = 0

    def put(self, made: Made | None, done: int) -> int:
        before = self._settle()
        self._done = done
        if made is not None:
            pixels = as_pixels(made.pictures, made.place.dtype)
            self._pending = self._leave(pixels), made.place
        return before

    def finish(self) -> Iterator[int]:
        yield self._settle()

    def _settle(self) -> int:
        if self._pending is not None:
            (host, wait), place = self._pending
            self._pending = None
            wait()
            place.copy_(host)
        return self._done


class PinnedCopy:
    """A copy on a stream of its own, into pinned memory that is used again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._staging: Tensor | None = None

    def __call__(self, pixels: Tensor) -> Leaving:
        pixels = pixels.contiguous()
        size = pixels.nbytes
        if self._staging is None or self._staging.nbytes < size:
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        host = self._staging[:size].view(pixels.dtype).view(pixels.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(pixels, non_blocking=True)
            arrived = self._stream.record_event()
        pixels.record_stream(self._stream)
        return host, arrived.synchronize


def build_writer(device: torch.device) -> Writer:
    return LateWriter(PinnedCopy(device)) if device.type == "cuda" else DirectWriter()


def as_pixels(pictures: Tensor, dtype: torch.dtype) -> Tensor:
    """Values from -1 to 1 as 0..1 in float32 or, rounded, as 0..255 in uint8. May overwrite `pictures`."""
    values = pictures.float().add_(1).div_(2)
    return values if dtype == torch.float32 else values.mul_(255).round_().to(dtype)
