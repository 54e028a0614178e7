"""Pictures in ComfyUI's form through the VAE and back: [frames, height, width, 3], float32, 0..1.

Decoded ones may be uint8 instead. Both directions are iterators that yield after each chunk, with the number of latent
frames that are done, so that a caller can report and stop in between. Of several devices each reads its share of the
input and writes its share of the result, chunk by chunk, into tensors that all of them see; what they exchange
meanwhile is up to the parts of the VAE that workers/parallel/vae replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.mesh.vae_shape import (
    FRAME_STRIDE,
    VAE_STRIDE,
    VAEConfig,
    latent_frames,
    pixel_frames,
)
from comfy_wan_dist.mesh.vae_split import LatentSize

from .layers import FrameHistory
from .tiles import Tiling, decode_tile, encode_tile, encode_window
from .wan22 import WanVAE
from .writer import Made, build_writer

PICTURE_DTYPES = (torch.float32, torch.uint8)


@dataclass(frozen=True, kw_only=True)
class VAEShare:
    """What one device does of a video, in latent rows, columns and frames.

    chunks: this device's frames in each chunk of the video; empty where only others have some.
    ends: how many frames of the video are done after each chunk, by all devices together.
    new_history: makes the history of a run over these chunks.
    tiling: how to go over the part in tiles, if memory asks for it.
    """

    rows: range
    columns: range
    chunks: tuple[range, ...]
    ends: tuple[int, ...]
    new_history: Callable[[], FrameHistory] = FrameHistory
    tiling: Tiling | None = None


def latent_size(latent: Tensor) -> LatentSize:
    """Frames, rows and columns of a latent [B, C, T, h, w]."""
    frames, height, width = latent.shape[2:]
    return LatentSize(frames=frames, height=height, width=width)


def validate_decode(config: VAEConfig, latent: Tensor, frames: Tensor) -> None:
    """Refuse a latent that is not [B, C, T, h, w], finite, or does not give `frames` [B*(4T-3), 16h, 16w, 3].

    `frames` are float32 or uint8.
    """
    if frames.dtype not in PICTURE_DTYPES:
        raise ConfigError(
            f"frames were asked for as {frames.dtype}; a VAE decodes to {' or '.join(map(str, PICTURE_DTYPES))}"
        )
    if latent.dim() != 5 or 0 in latent.shape:
        raise ConfigError(
            f"the latent has shape {list(latent.shape)}; a VAE decodes [batch, channels, frames, height, width]"
        )
    batch, channels, count, height, width = latent.shape
    expected = (batch * pixel_frames(count), VAE_STRIDE * height, VAE_STRIDE * width, 3)
    if tuple(frames.shape) != expected:
        raise ConfigError(
            f"room for frames of shape {list(frames.shape)} was given; this latent decodes to {list(expected)}"
        )
    if channels != config.z_dim:
        raise ConfigError(f"the latent has {channels} channels; this VAE decodes {config.z_dim}")
    is_finite = torch.isfinite(latent).all(4).all(3).all(1)
    if not bool(is_finite.all()):
        sample, frame = (~is_finite).nonzero()[0].tolist()
        of_sample = f" of sample {sample + 1}" if batch > 1 else ""
        raise ConfigError(
            f"the latent holds NaN or infinite values, first in frame {frame + 1} of {count}{of_sample}; sample it "
            "again with dtype bfloat16 or float32"
        )


def validate_encode(config: VAEConfig, frames: Tensor, latent: Tensor) -> None:
    """Refuse frames that are not [4k+1, 16h, 16w, 3] or do not give `latent` [1, C, k+1, h, w]."""
    if (
        frames.dim() != 4
        or frames.shape[-1] != 3
        or 0 in frames.shape
        or frames.shape[0] % FRAME_STRIDE != 1
        or frames.shape[1] % VAE_STRIDE
        or frames.shape[2] % VAE_STRIDE
    ):
        raise ConfigError(
            f"the images have shape {list(frames.shape)}; the VAE encodes [frames, height, width, 3] with 4k+1 frames "
            f"and height and width that are multiples of {VAE_STRIDE}"
        )
    count, height, width = frames.shape[0], frames.shape[1], frames.shape[2]
    expected = (latent_frames(count), height // VAE_STRIDE, width // VAE_STRIDE)
    if latent.dim() != 5 or latent.shape[0] != 1 or tuple(latent.shape[2:]) != expected:
        raise ConfigError(
            f"room for a latent of shape {list(latent.shape)} was given; these images encode to "
            f"[1, channels, {', '.join(map(str, expected))}]"
        )
    if latent.shape[1] != config.z_dim:
        raise ConfigError(
            f"a latent of {latent.shape[1]} channels was asked for; this VAE encodes {config.z_dim}"
        )


def decode_chunks_into(
    vae: WanVAE,
    latent: Tensor,
    frames: Tensor,
    *,
    share: VAEShare,
    device: torch.device,
) -> Iterator[int]:
    """Decode this device's share of latent [B, C, T, h, w] (raw VAE space) into its share of `frames`.

    Both are as `validate_decode` has them. Each sample goes through alone, so memory is that of one. With tiles each
    chunk comes several times, and what is yielded grows by less than a frame each time. Raises ConfigError at the end
    if what was made is not finite.
    """
    writer = build_writer(device)
    total = torch.zeros((), device=device)  # NaN once one of the clamped values is
    rows, columns = pixels_of(share.rows), pixels_of(share.columns)
    videos = frames.unflatten(0, (latent.shape[0], -1))[:, :, rows, columns]
    parts = latent[:, :, :, as_slice(share.rows), as_slice(share.columns)]
    decode = decode_whole if share.tiling is None else decode_tiles
    for index, (part, video) in enumerate(zip(parts, videos, strict=True)):
        for made, end in decode(vae, part, video, share, device):
            if made is not None:
                total += made.pictures.sum(dtype=torch.float32)
            yield writer.put(made, index * latent.shape[2] + end)
    yield from writer.finish()
    require_finite(total, vae)


Decoded = Iterator[tuple[Made | None, int]]
"""What each step made, None where only others made something, and how many latent frames are decoded then."""


def decode_whole(
    vae: WanVAE, part: Tensor, video: Tensor, share: VAEShare, device: torch.device
) -> Decoded:
    """Decode part [C, T, h, w] of a sample, its place being video [F, H, W, 3]."""
    history = share.new_history()
    for chunk, end in zip(share.chunks, share.ends, strict=True):
        made = None
        if chunk:
            z = part[None, :, as_slice(chunk)].to(device)
            made = Made(
                pictures=as_frames(vae.decode_chunk(z, history)), place=video[frames_of(chunk)]
            )
        history.next_chunk()
        yield made, end


def decode_tiles(
    vae: WanVAE, part: Tensor, video: Tensor, share: VAEShare, device: torch.device
) -> Decoded:
    """Decode as `decode_whole` does, but tile by tile, all frames in each, and what needs whole frames first."""
    tiling = share.tiling
    assert tiling is not None
    tiles, history = len(tiling.tiles), share.new_history()
    middle = []
    for chunk in share.chunks:
        if chunk:
            x = vae.decoder_input(part[None, :, as_slice(chunk)].to(device))
            middle.append(tiling.widen(vae.decoder.enter(x, history)))
        history.next_chunk()
        yield None, 0
    for index, tile in enumerate(tiling.tiles):
        history = FrameHistory()
        for step, (chunk, end) in enumerate(zip(share.chunks, share.ends, strict=True)):
            made = None
            if tile:
                made = Made(
                    pictures=as_frames(decode_tile(vae, middle[step], tile, tiling, history)),
                    place=tile_of(video, tile, tiling)[frames_of(chunk)],
                )
            history.next_chunk()
            yield made, (index * share.ends[-1] + end) // tiles


def tile_of(video: Tensor, tile: range, tiling: Tiling) -> Tensor:
    """A tile's place in the pictures [F, H, W, 3] of this device's part."""
    pixels = pixels_of(range(tile.start - tiling.part.start, tile.stop - tiling.part.start))
    return video.narrow(tiling.dim - 1, pixels.start, pixels.stop - pixels.start)


def as_frames(pixels_bcfhw: Tensor) -> Tensor:
    """Pixels [1, 3, F, H, W] of one sample as pictures [F, H, W, 3]."""
    return pixels_bcfhw[0].permute(1, 2, 3, 0)


def encode_chunks_into(
    vae: WanVAE, frames: Tensor, latent: Tensor, *, share: VAEShare, device: torch.device
) -> Iterator[int]:
    """Encode this device's share of `frames` to its share of the raw latent, as `validate_encode` has them.

    Raises ConfigError at the end if that is not finite.
    """
    part = latent[:, :, :, as_slice(share.rows), as_slice(share.columns)]
    encode = encode_whole if share.tiling is None else encode_tiles
    yield from encode(vae, frames, part, share, device)
    for chunk in share.chunks:
        require_finite(part[:, :, as_slice(chunk)], vae)


def require_finite(values: Tensor, vae: WanVAE) -> None:
    if not bool(torch.isfinite(values).all()):
        raise ConfigError(
            f"the VAE made NaN or infinite values in {str(vae.dtype).removeprefix('torch.')}; set vae_dtype to "
            "bfloat16 or float32, or check that its file is whole"
        )


def encode_whole(
    vae: WanVAE, frames: Tensor, part: Tensor, share: VAEShare, device: torch.device
) -> Iterator[int]:
    """Encode what belongs to part [1, C, T, h, w] of frames [F, H, W, 3], both in host memory."""
    pictures = frames[:, pixels_of(share.rows), pixels_of(share.columns)]
    history = share.new_history()
    for chunk, end in zip(share.chunks, share.ends, strict=True):
        if chunk:
            pixels = as_pixel_input(pictures[frames_of(chunk)], device)
            part[:, :, as_slice(chunk)] = vae.encode_chunk(pixels, history)
        history.next_chunk()
        yield end


def encode_tiles(
    vae: WanVAE, frames: Tensor, part: Tensor, share: VAEShare, device: torch.device
) -> Iterator[int]:
    """Encode as `encode_whole` does, but tile by tile, all frames in each, and what needs whole frames last."""
    tiling = share.tiling
    assert tiling is not None
    rounds = len(tiling.tiles) + 1
    middle: list[list[Tensor]] = [[] for _ in share.chunks]
    for index, tile in enumerate(tiling.tiles):
        history = FrameHistory()
        window = encode_window(vae, tile, tiling)
        for chunk, end, pieces in zip(share.chunks, share.ends, middle, strict=True):
            if tile:
                pictures = frames[frames_of(chunk)].narrow(
                    tiling.dim - 1, window.start, len(window)
                )
                pixels = as_pixel_input(pictures, device)
                pieces.append(encode_tile(vae, pixels, tile, tiling, history).clone())
            history.next_chunk()
            yield (index * share.ends[-1] + end) // rounds
    history = share.new_history()
    for chunk, end, pieces in zip(share.chunks, share.ends, middle, strict=True):
        if chunk:
            x = vae.encoder.leave(torch.cat(pieces, dim=tiling.dim), history)
            part[:, :, as_slice(chunk)] = vae.mean_of(x)
        history.next_chunk()
        yield ((rounds - 1) * share.ends[-1] + end) // rounds


def as_pixel_input(pictures: Tensor, device: torch.device) -> Tensor:
    """Pictures [F, H, W, 3] in 0..1 as pixels [1, 3, F, H, W] in [-1, 1] on the device."""
    return pictures.to(device).permute(3, 0, 1, 2).mul(2).sub_(1).unsqueeze(0)


def as_slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def pixels_of(latent_rows: range) -> slice:
    """Pixel rows of latent rows; columns alike."""
    return slice(VAE_STRIDE * latent_rows.start, VAE_STRIDE * latent_rows.stop)


def frames_of(latent_range: range) -> slice:
    """Pixel frames of latent frames."""
    return slice(pixel_frames(latent_range.start), pixel_frames(latent_range.stop))
