"""Section "vae": decoding on one and two ranks, one thread each, in float32 on the CPU.

On one rank ours is set against diffusers' and ComfyUI's. On two, which share the frames' columns or rows, it is set
against one; the ceiling is what two independent decodes at once gain over one after the other. Memory is what decoding
a long video takes over a short one, the frames themselves left out.

Not covered: encoding, more than two ranks, devices other than the CPU (gpu.py has those).
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.vae_shape import VAEConfig, pixel_frames
from comfy_wan_dist.mesh.vae_split import LatentSize, VAESplit
from devtools.checkpoints import vae_weights
from devtools.mesh_runs import relative_error
from devtools.rank_pool import RankPool
from devtools.references import build_diffusers_vae
from devtools.vae_runs import CPU, build_seeded_vae, make_inputs, picture_shape
from workers.parallel.groups import PlaneGroups
from workers.parallel.vae.share import apply_vae_split
from workers.vae.run import VAEShare, decode_chunks_into, pixels_of

from .models import use_comfyui
from .pace import COLLECTIVE_TIMEOUT, START_TIMEOUT_S, slowest_rank, stopwatch
from .timing import Comparison, Row, Sense, build_row, interleave

SECTION = "vae"
CONFIG = VAEConfig(encoder_dim=40, decoder_dim=64)
SIZE = LatentSize(frames=3, height=8, width=12)
"""What one rank decodes against others' implementations."""
WIDE = LatentSize(frames=2, height=16, width=32)
"""What two ranks decode. Each has 16 columns, as each of five has of a frame of 704x1280."""
TINY = VAEConfig(encoder_dim=8, decoder_dim=8)
SHORT, LONG = (LatentSize(frames=frames, height=16, width=24) for frames in (9, 31))

M_MMAP_THRESHOLD = -3  # malloc.h

SPEED_UP = 1.8
GROWTH = 1.05
"""Limit of the long video's peak memory over the short one's."""
TOLERANCE = 1e-4
"""How far outputs may differ, as a part of the largest value, for a comparison of speed to mean anything."""


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One decode to frames [F, H, W, 3] of this rank's share."""

    run: Callable[[], Tensor]
    share: VAEShare


def measure(*, budget_s: float, report: Callable[[Row], None]) -> None:
    """All rows of the section; `budget_s` is the measured time of each group of things compared."""
    for world_size, function, size in ((1, one_rank, SIZE), (2, two_ranks, WIDE)):
        # Processes of their own for each: what one leaves in its heap does not slow the next.
        with RankPool() as pool:
            timeout_s = START_TIMEOUT_S + 3 * budget_s
            answers = pool.run(world_size, function, CONFIG, size, budget_s, timeout_s=timeout_s)
        for row in answers[0]:
            report(row)
    report(memory_row(TINY, SHORT, LONG))


def our_decode(config: VAEConfig, size: LatentSize, *, rank: int, space: int) -> Decode:
    """Decode a seeded latent on `space` ranks."""
    vae, inputs = build_seeded_vae(config), make_inputs(config, size)
    split = VAESplit(size=size, axis=size.longer, space=space, time=1)
    plane = PlaneGroups(layout=MeshDegrees(ring=space), rank=rank)
    share = apply_vae_split(vae, split, plane)
    frames = torch.full_like(inputs.frames, 0.0)  # touches its pages

    def run() -> Tensor:
        for _ in decode_chunks_into(vae, inputs.latent, frames, share=share, device=CPU):
            pass
        return frames

    return Decode(run=run, share=share)


@torch.inference_mode()
def one_rank(rank: int, config: VAEConfig, size: LatentSize, budget_s: float) -> tuple[Row, ...]:
    """Rows of one decode of ours against others'."""
    ours = our_decode(config, size, rank=rank, space=1).run
    latent, weights = make_inputs(config, size).latent, vae_weights(config, seed=2)
    diffusers = build_diffusers_vae(config, weights)
    comfyui = build_comfyui_vae(config, weights)
    others: dict[str, Callable[[], Tensor]] = {
        "diffusers": lambda: diffusers.decode(latent).sample,
        "ComfyUI": lambda: comfyui.decode(latent),
    }
    expected = ours()
    for name, other in others.items():
        pictures = (other()[0].permute(1, 2, 3, 0).clamp(-1, 1) + 1) / 2
        _require_equal(name, pictures, expected)
    comparisons = [
        Comparison(
            case=f"one rank / {name}, {label(size)}",
            ours="ours",
            other=name,
            limit=1.0,
            note="ours writes pictures of 0..1, theirs end before that",
        )
        for name in others
    ]
    things = {name: stopwatch(run) for name, run in {"ours": ours, **others}.items()}
    times = interleave(things, comparisons, budget_s=budget_s)
    return tuple(build_row(SECTION, comparison, times) for comparison in comparisons)


@torch.inference_mode()
def two_ranks(rank: int, config: VAEConfig, size: LatentSize, budget_s: float) -> tuple[Row, ...]:
    """Rows of what two ranks gain. Every rank returns the same."""
    single = our_decode(config, size, rank=0, space=1).run
    both = our_decode(config, size, rank=rank, space=2)
    expected, frames = single(), both.run()
    rows, columns = pixels_of(both.share.rows), pixels_of(both.share.columns)
    _require_equal("two ranks", frames[:, rows, columns], expected[:, rows, columns])
    pace = dist.new_group(timeout=COLLECTIVE_TIMEOUT)
    things = {
        "alone": slowest_rank(single, pace, is_idle=rank != 0),
        "two at once": slowest_rank(single, pace),
        "two ranks": slowest_rank(both.run, pace),
    }
    comparisons = (
        Comparison(
            case=f"two ranks speed-up, {label(size)}",
            ours="two ranks",
            other="alone",
            limit=SPEED_UP,
            sense=Sense.AT_LEAST,
            note="one rank's time over two ranks'",
        ),
        Comparison(
            case=f"two at once speed-up, {label(size)}",
            ours="two at once",
            other="alone",
            other_part=2.0,
            limit=None,
            sense=Sense.AT_LEAST,
            note="the ceiling: two decodes at once over one after the other",
        ),
    )
    times = interleave(things, comparisons, budget_s=budget_s)
    return tuple(build_row(SECTION, comparison, times) for comparison in comparisons)


def memory_row(config: VAEConfig, short: LatentSize, long: LatentSize) -> Row:
    """How the memory of decoding grows with the number of frames."""
    peaks = []
    for size in (short, long):
        with RankPool() as pool:
            peaks.append(pool.run(1, peak_memory, config, size)[0])
    ratio = peaks[1] / peaks[0]
    return Row(
        section=SECTION,
        case=f"memory, {pixel_frames(long.frames)} / {pixel_frames(short.frames)} frames",
        ours_s=None,
        other_s=None,
        ratio=ratio,
        limit=GROWTH,
        ok=ratio <= GROWTH,
        rounds=1,
        note=f"{peaks[1] / 1e6:.1f} MB and {peaks[0] / 1e6:.1f} MB over what the process had before",
    )


@torch.inference_mode()
def peak_memory(rank: int, config: VAEConfig, size: LatentSize) -> int:
    """Bytes that a decode needs at most, without the latent, the weights and the frames."""
    # What a tensor leaves goes back to the system at once, instead of into a heap that counts as the process' own.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    decode = our_decode(config, size, rank=rank, space=1)
    with PeakMemory() as memory:
        decode.run()
    return memory.peak


class PeakMemory:
    """Largest growth of the process' own memory while the context is open, looked at every millisecond."""

    def __enter__(self) -> PeakMemory:
        gc.collect()  # what goes meanwhile would hide as much growth
        self._before = own_memory()
        self.peak = 0
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.001):
            self.peak = max(self.peak, own_memory() - self._before)


def own_memory() -> int:
    """Resident bytes of this process that no file backs."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * mmap.PAGESIZE


def build_comfyui_vae(config: VAEConfig, weights: Mapping[str, Tensor]) -> Any:
    """ComfyUI's Wan2.2 VAE of this configuration, with torch's attention."""
    use_comfyui()
    from comfy.ldm.wan import vae2_2

    reference = vae2_2.WanVAE(
        dim=config.encoder_dim,
        dec_dim=config.decoder_dim,
        z_dim=config.z_dim,
        dim_mult=list(config.dim_mult),
        num_res_blocks=config.encoder_res_blocks,
        temperal_downsample=list(config.temporal_levels),
    )
    reference.load_state_dict(weights)
    return reference.eval().requires_grad_(False)


def label(size: LatentSize) -> str:
    frames, height, width, _ = picture_shape(size)
    return f"{frames} frames {height}x{width} fp32"


def _require_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    error = relative_error(actual, expected)
    if error > TOLERANCE:
        raise RuntimeError(
            f"{name} and one rank of ours differ by {error:.1e} of the largest value; {TOLERANCE:.0e} is allowed: "
            "their speeds are not comparable"
        )
