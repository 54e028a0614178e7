"""What tests of the VAE on several ranks share: a small VAE, what one process makes with it, and rows of jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from vae_programs import VAEJob, VAEJobEnd, run_vae_jobs

from comfy_wan_dist.ipc.messages import VAESpec
from comfy_wan_dist.mesh.vae_shape import VAEConfig
from comfy_wan_dist.mesh.vae_split import LatentSize, VAESplit, fastest_split, possible_splits
from devtools.checkpoints import write_vae
from devtools.mesh_runs import mesh_degrees, relative_error
from devtools.rank_pool import RankPool
from devtools.vae_runs import (
    VAERun,
    build_seeded_vae,
    decode,
    encode,
    joined,
    make_inputs,
    vae_spec,
)

CONFIG = VAEConfig(z_dim=48, encoder_dim=8, decoder_dim=8)
SMALL = LatentSize(frames=3, height=3, width=7)
DECODE, ENCODE = 0, 1

OneProcess = Callable[[LatentSize], tuple[Tensor, Tensor]]


def chosen_split(size: LatentSize, *, ranks: int) -> VAESplit:
    """The split that is taken where memory does not matter."""
    return fastest_split(possible_splits(size, ranks=ranks))


def build_one_process() -> OneProcess:
    """Decoded frames and encoded latent of one process, for each size once."""
    vae = build_seeded_vae(CONFIG)

    @cache
    def run(size: LatentSize) -> tuple[Tensor, Tensor]:
        inputs = make_inputs(CONFIG, size)
        with torch.inference_mode():
            pictures = decode(vae, inputs.latent)[0].permute(1, 2, 3, 0)
            pixels = inputs.frames.permute(3, 0, 1, 2).unsqueeze(0) * 2 - 1
            return (pictures + 1) / 2, encode(vae, pixels)

    return run


def errors(runs: list[VAERun], expected: tuple[Tensor, Tensor]) -> tuple[float, float]:
    decoded = joined([run.decoded for run in runs])
    encoded = joined([run.encoded for run in runs])
    return relative_error(decoded, expected[0]), relative_error(encoded, expected[1])


def write_vae_file(folder: Path) -> VAESpec:
    path = folder / "vae.safetensors"
    write_vae(path, CONFIG, seed=2)
    return vae_spec(path)


def run_jobs(rank_pool: RankPool, mesh: str, spec: VAESpec, *jobs: VAEJob) -> list[list[VAEJobEnd]]:
    """For each job how it ended on each rank."""
    answers = rank_pool.run(mesh_degrees(mesh).world_size, run_vae_jobs, mesh, spec, jobs)
    return [list(ends) for ends in zip(*answers, strict=True)]
