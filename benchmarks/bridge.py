"""Section "bridge": ComfyUI's own samplers on a MODEL whose forwards run in a group, on the CPU, one thread each rank.

- What a call takes beyond the model's own work: ranks whose layers do nothing get and answer a latent of 10.2 MB. What
  making it into tokens and back takes, of which each rank has its share, is measured in this process and left out.
- A sampler's run of real forwards, beside the same run inside the group (WanDistSampler), and beside ComfyUI's native
  MODEL in this process with as many threads as there are ranks.

Not covered: devices other than the CPU.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from devtools.checkpoints import write_transformer
from devtools.mesh_runs import mesh_degrees, relative_error

from .models import use_comfyui
from .timing import Comparison, Row, build_row, interleave

SECTION = "bridge"
IDLE = WanShape(dim=256, ffn_dim=256, num_layers=1, in_dim=48, out_dim=48)
IDLE_LATENT = (1, 48, 13, 64, 64)
IDLE_MESHES = {"single": (1, 1), "cfg2": (2, 2), "tp2": (1, 2)}
"""By mesh: among how many ranks the tokens to be made are shared, and those to be written."""
IDLE_RUNNER = "benchmarks.bridge:build_idle_runner"
HAND_OVER_S = 0.005
HAND_OVER = "tokens + 5 ms"
REAL = WanShape(dim=1024, ffn_dim=4096, num_layers=4, in_dim=48, out_dim=48)
REAL_GRID = LatentGrid(frames=5, rows=16, columns=16)
REAL_MESHES = ("cfg2", "tp2")
STEPS = 4
TEXT = (1, 512, 4096)
TOLERANCE = 1e-4
"""How far results may differ, as a part of the largest value, for a comparison of speed to mean anything."""


def measure(
    *,
    budget_s: float,
    report: Callable[[Row], None],
    idle: tuple[int, ...] = IDLE_LATENT,
    idle_meshes: Sequence[str] = tuple(IDLE_MESHES),
    real: tuple[WanShape, LatentGrid] = (REAL, REAL_GRID),
    real_meshes: Sequence[str] = REAL_MESHES,
) -> None:
    """All rows of the section; `budget_s` is the measured time of each mesh."""
    use_comfyui()
    logging.getLogger("comfy_wan_dist").setLevel(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for mesh in idle_meshes:
            report(_hand_over(mesh, idle, budget_s))
        for mesh in real_meshes:
            for row in _runs(mesh, *real, budget_s):
                report(row)
    finally:
        torch.set_num_threads(threads)


# ---- the hand-over alone


def build_idle_runner(**arguments: Any) -> Any:
    """In a rank: the product's runner, whose model does nothing."""
    from workers.runner import PlaneRunner

    def pass_on(model: object, batches: Any, **_: object) -> list[Tensor]:
        return [batch.tokens for batch in batches]

    mock.patch("workers.sampling.forward.forward_in_stages", pass_on).start()
    return PlaneRunner(**arguments)


def _hand_over(mesh: str, latent: tuple[int, ...], budget_s: float) -> Row:
    from comfy_wan_dist.jobs.session import planes_for

    def idle_planes(model: Any) -> tuple[LaunchSpec, ...]:
        return tuple(replace(spec, runner=IDLE_RUNNER) for spec in planes_for(model))

    x, text = torch.randn(latent), torch.randn(TEXT)
    timesteps = torch.full((latent[0],), 500.0)
    with (
        _handle(IDLE, mesh) as handle,
        mock.patch("comfy_wan_dist.jobs.forwards.planes_for", idle_planes),
    ):
        predict = _open_run(handle)

        def call() -> float:
            again = text.clone()  # as ComfyUI makes a tensor of equal values for every call
            started = time.perf_counter()
            predict(x, timesteps, again)
            return time.perf_counter() - started

        megabytes = 4 * x.numel() / 1e6
        comparison = Comparison(
            case=f"a call that computes nothing / {HAND_OVER}, {megabytes:.1f} MB, {mesh}",
            ours="call",
            other=HAND_OVER,
            limit=1.0,
            note="text compared",
        )
        things = {"call": call, HAND_OVER: lambda: _tokens_s(x, *IDLE_MESHES[mesh]) + HAND_OVER_S}
        return build_row(SECTION, comparison, interleave(things, [comparison], budget_s=budget_s))


def _tokens_s(x: Tensor, makers: int, writers: int) -> float:
    """How long one thread takes for a rank's share of making tokens of a latent, and of writing them to another."""
    from comfy_wan_dist.mesh.shards import shard_range, token_shards
    from workers.model.tokens import grid_of, write_tokens
    from workers.sampling.forward import own_tokens

    grid, batch = grid_of(x), shard_range(x.shape[0], parts=1, rank=0)
    made = token_shards(grid.tokens, cp=(makers, 0), sp=(1, 0))
    result, threads = x.clone(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started = time.perf_counter()
        tokens = own_tokens(x, batch, made)
        write_tokens(tokens[:, : grid.tokens // writers], grid, 0, result)
        return time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)


def _open_run(handle: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from comfy_wan_dist.comfyui.patches import CarriedPatches
    from comfy_wan_dist.jobs.forwards import SamplerRuns
    from comfy_wan_dist.jobs.handle import HIGH_NOISE

    return SamplerRuns(handle, expert=HIGH_NOISE)(CarriedPatches(key=None, files=()))


# ---- whole runs


def _runs(mesh: str, shape: WanShape, grid: LatentGrid, budget_s: float) -> Iterator[Row]:
    import comfy.sample
    import comfy.sd

    from comfy_wan_dist.comfyui.remote_model import build_model
    from comfy_wan_dist.jobs.forwards import SamplerRuns
    from comfy_wan_dist.jobs.handle import HIGH_NOISE
    from comfy_wan_dist.nodes.sampler import Sampler

    latent = torch.zeros(1, shape.out_dim, grid.frames, 2 * grid.rows, 2 * grid.columns)
    cond, uncond = ([[torch.randn(1, 512, shape.text_dim), {}]] for _ in range(2))
    noise = comfy.sample.prepare_noise(latent, 1)

    def stock(model: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            sampled: Tensor = comfy.sample.sample(
                model,
                noise,
                STEPS,
                5.0,
                "euler",
                "simple",
                cond,
                uncond,
                latent,
                disable_pbar=True,
            )
            return sampled

        return run

    with _handle(shape, mesh) as handle:

        def inside() -> Tensor:
            output = asyncio.run(
                Sampler.execute(
                    model=handle,
                    positive=cond,
                    negative=uncond,
                    latent_image={"samples": latent},
                    seed=1,
                    steps=STEPS,
                    cfg=5.0,
                    sampler_name="euler",
                    scheduler="simple",
                    shift=8.0,
                    denoise=1.0,
                )
            )
            sampled: Tensor = output.result[0]["samples"]
            return sampled

        runs = {
            "own MODEL": stock(build_model(shape, SamplerRuns(handle, expert=HIGH_NOISE))),
            "WanDistSampler": inside,
            "native MODEL": stock(comfy.sd.load_diffusion_model(handle.path)),
        }
        expected = runs["native MODEL"]()
        for name, run in runs.items():
            error = relative_error(run(), expected)
            if error > TOLERANCE:
                raise RuntimeError(f"{name} differs from the native MODEL by {error:.1e}")
        label = f"{STEPS} steps of euler, cfg 5, {grid.tokens} tokens, {mesh}"
        comparisons = [
            Comparison(
                case=f"own MODEL / {other}, {label}", ours="own MODEL", other=other, limit=None
            )
            for other in ("WanDistSampler", "native MODEL")
        ]
        times = interleave(
            {name: _timed(run) for name, run in runs.items()}, comparisons, budget_s=budget_s
        )
        yield from (build_row(SECTION, comparison, times) for comparison in comparisons)


def _timed(run: Callable[[], Tensor]) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return timed


@contextmanager
def _handle(shape: WanShape, mesh: str) -> Iterator[Any]:
    """A model of this shape for a mesh on the CPU; its groups end with the context."""
    from comfy_wan_dist.group.default import default_groups
    from comfy_wan_dist.jobs.handle import ModelHandle

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_transformer(path, shape, seed=1)
        try:
            yield ModelHandle(
                path=str(path),
                dtype="float32",
                mesh=mesh,
                devices=f"cpu:{mesh_degrees(mesh).world_size}",
                compile=False,
            )
        finally:
            default_groups().stop_all()
