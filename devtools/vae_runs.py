"""The VAE on several ranks through the product's own code, without ComfyUI and sockets: what parity is measured on.

Functions named `*_rank` run in a `RankPool`. Each rank fills its share of a result of its own, NaN elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comfy_wan_dist.ipc.messages import (
    DecodeRequest,
    EncodeRequest,
    LedgerLine,
    TensorRef,
    VAESpec,
)
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.vae_shape import VAE_STRIDE, VAEConfig, latent_frames, pixel_frames
from comfy_wan_dist.mesh.vae_split import LatentSize, VAESplit
from devtools.reading import pass_by, read_alone
from workers.checkpoint.vae import build_vae, load_vae_weights
from workers.parallel.groups import PlaneGroups
from workers.parallel.vae.share import apply_vae_split
from workers.vae import run
from workers.vae.layers import FrameHistory
from workers.vae.run import VAEShare, decode_chunks_into, encode_chunks_into
from workers.vae.wan22 import WanVAE

from .checkpoints import vae_weights

CPU = torch.device("cpu")
LIMIT = 1e-5
"""Allowed error in float32 against one process, as a part of the largest value."""


@dataclass(frozen=True, kw_only=True)
class VAEInputs:
    """A latent [B, C, T, h, w] to decode, and frames [4T-3, 16h, 16w, 3] to encode, of one size."""

    latent: Tensor
    frames: Tensor


@dataclass(frozen=True, kw_only=True)
class VAERun:
    """What one rank made of its share; what is not its share is NaN. The ledgers are of the two jobs."""

    decoded: Tensor
    encoded: Tensor
    decode_ledger: tuple[LedgerLine, ...]


def make_inputs(config: VAEConfig, size: LatentSize, *, batch: int = 1) -> VAEInputs:
    """Seeded inputs; latents small enough that few pixels of random weights are cut off at the range's ends."""
    generator = torch.Generator().manual_seed(size.frames)
    latent = torch.randn(
        batch, config.z_dim, size.frames, size.height, size.width, generator=generator
    )
    frames = torch.rand(picture_shape(size), generator=generator)
    return VAEInputs(latent=latent, frames=frames)


def picture_shape(size: LatentSize) -> tuple[int, int, int, int]:
    """The frames that a latent of this size stands for: [4T-3, 16h, 16w, 3]."""
    return pixel_frames(size.frames), VAE_STRIDE * size.height, VAE_STRIDE * size.width, 3


def build_seeded_vae(config: VAEConfig) -> WanVAE:
    vae = WanVAE(config)
    vae.load_state_dict(vae_weights(config, seed=2))
    vae.arrange_weights()
    return vae


def load_vae(path: str, *, dtype: torch.dtype, device: torch.device) -> tuple[WanVAE, int]:
    """The VAE in `path` and the bytes read, on one rank alone. Raises ModelFileError."""
    vae, entries = build_vae(path, dtype=dtype, device=device)
    return vae, load_vae_weights(vae, entries, sharing=read_alone(), milestone=pass_by)


def whole_share(size: LatentSize) -> VAEShare:
    """All of a video as the share of one rank, one latent frame at a time."""
    return VAEShare(
        rows=range(size.height),
        columns=range(size.width),
        chunks=tuple(range(frame, frame + 1) for frame in range(size.frames)),
        ends=tuple(range(1, size.frames + 1)),
    )


def decode(vae: WanVAE, z_bcthw: Tensor) -> Tensor:
    """Raw latents [B, z_dim, T, h, w] as pixels [B, 3, 4 * T - 3, 16 * h, 16 * w] in [-1, 1]."""
    return torch.cat(list(decode_chunks(vae, z_bcthw)), dim=2)


def decode_chunks(vae: WanVAE, z_bcthw: Tensor) -> Iterator[Tensor]:
    """`decode` one latent frame at a time: [B, 3, 1, H, W], then [B, 3, 4, H, W] each."""
    history = FrameHistory()
    for frame_bcthw in torch.split(z_bcthw, 1, dim=2):
        yield vae.decode_chunk(frame_bcthw, history)
        history.next_chunk()


def encode(vae: WanVAE, pixels_bcfhw: Tensor) -> Tensor:
    """Pixels [B, 3, F, H, W] in [-1, 1] as raw means [B, z_dim, (F - 1) // 4 + 1, H / 16, W / 16].

    H and W are multiples of 16. Frames beyond the last full 4 * k + 1 are not encoded.
    """
    return torch.cat(list(encode_chunks(vae, pixels_bcfhw)), dim=2)


def encode_chunks(vae: WanVAE, pixels_bcfhw: Tensor) -> Iterator[Tensor]:
    """`encode` 1 pixel frame, then 4 at a time: the raw mean [B, z_dim, 1, h, w] of each."""
    history = FrameHistory()
    yield vae.encode_chunk(pixels_bcfhw[:, :, :1], history)
    history.next_chunk()
    step = vae.config.temporal_factor
    for end in range(1 + step, pixels_bcfhw.shape[2] + 1, step):
        yield vae.encode_chunk(pixels_bcfhw[:, :, end - step : end], history)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside; `peak` is the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget() -> None:
            self._known.discard(key)
            self._live -= size

        self._known.add(key)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, forget)


def live_bytes(config: VAEConfig, share_of: VAESplit, *, is_decode: bool, at_once: int = 1) -> int:
    """Most bytes alive at once in one process that works with a bfloat16 VAE. Computes nothing.

    at_once: latent frames in each chunk, which the split does not say. The job's own tensors are not counted.
    """
    # What has no values cannot be asked for them.
    unasked = mock.patch.object(run, "require_finite")
    with unasked, FakeTensorMode(), torch.inference_mode():
        vae = WanVAE(config)
        for parameter in vae.parameters():
            parameter.data = parameter.data.bfloat16()
        size = share_of.size
        latent = torch.empty(1, config.z_dim, size.frames, size.height, size.width)
        frames = torch.empty(picture_shape(size))
        share = apply_vae_split(vae, share_of, PlaneGroups(layout=MeshDegrees(), rank=0))
        starts = (0, *range(1, size.frames, at_once), size.frames)
        chunks = tuple(range(*edges) for edges in pairwise(starts))
        share = replace(share, chunks=chunks, ends=starts[1:])
        with LiveBytes() as count:
            if is_decode:
                list(decode_chunks_into(vae, latent, frames, share=share, device=CPU))
            else:
                list(encode_chunks_into(vae, frames, latent, share=share, device=CPU))
    return count.peak - latent.nbytes - frames.nbytes


def vae_rank(
    rank: int, world_size: int, config: VAEConfig, splits: Sequence[VAESplit]
) -> list[VAERun]:
    """Decode and encode seeded inputs of each split's size with one VAE and one set of groups."""
    vae = build_seeded_vae(config)
    plane = PlaneGroups(layout=MeshDegrees(ring=world_size), rank=rank)
    with torch.inference_mode():
        return [run_split(vae, plane, split) for split in splits]


def run_split(vae: WanVAE, plane: PlaneGroups, split: VAESplit) -> VAERun:
    inputs = make_inputs(vae.config, split.size)
    decoded = torch.full_like(inputs.frames, torch.nan)
    encoded = torch.full_like(inputs.latent, torch.nan)
    share = apply_vae_split(vae, split, plane)
    plane.ledger.clear()
    ends = list(decode_chunks_into(vae, inputs.latent, decoded, share=share, device=CPU))
    decode_ledger = plane.ledger.lines()
    plane.ledger.clear()
    encode_ends = list(encode_chunks_into(vae, inputs.frames, encoded, share=share, device=CPU))
    if split.tiles == 1:
        assert ends == encode_ends == list(accumulate(map(sum, split.chunks())))
    else:
        for each in (ends, encode_ends):
            assert each == sorted(each)
            assert each[-1] == split.size.frames > each[-2]
    return VAERun(
        decoded=decoded,
        encoded=encoded,
        decode_ledger=decode_ledger,
    )


def joined(shares: Sequence[Tensor]) -> Tensor:
    """The ranks' shares as one tensor. Raises ValueError unless each element has been made by one rank."""
    made = torch.stack([~torch.isnan(share) for share in shares])
    if not bool((made.sum(0) == 1).all()):
        raise ValueError("the shares leave elements out, or overlap")
    return torch.stack(list(shares)).nan_to_num(0.0).sum(0)


def vae_spec(path: Path) -> VAESpec:
    status = path.stat()
    return VAESpec(
        path=str(path), file_bytes=status.st_size, mtime_ns=status.st_mtime_ns, dtype="float32"
    )


def build_decode(
    spec: VAESpec, latent: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[DecodeRequest, list[Tensor]]:
    """The request and the tensors that its refs name: the latent, and the frames, which are NaN, or 0 as integers."""
    batch, _, count, height, width = latent.shape
    untouched = torch.nan if dtype.is_floating_point else 0
    pictures, *rest = picture_shape(LatentSize(frames=count, height=height, width=width))
    frames = torch.full((batch * pictures, *rest), untouched, dtype=dtype)
    request = DecodeRequest(id="local", vae=spec, latent=_ref(0, latent), result=_ref(1, frames))
    return request, [latent, frames]


def build_encode(
    spec: VAESpec, frames: Tensor, channels: int
) -> tuple[EncodeRequest, list[Tensor]]:
    """The request and the tensors that its refs name: the frames, and the latent, which is NaN."""
    count, height, width = frames.shape[:3]
    size = latent_frames(count), height // VAE_STRIDE, width // VAE_STRIDE
    latent = torch.full((1, channels, *size), torch.nan)
    request = EncodeRequest(id="local", vae=spec, frames=_ref(0, frames), result=_ref(1, latent))
    return request, [frames, latent]


def _ref(buffer: int, tensor: Tensor) -> TensorRef:
    return TensorRef(buffer=buffer, offset=0, dtype="float32", shape=tuple(tensor.shape))
