"""Bench section "bridge": what a stock sampler's call of the group's MODEL takes beyond the model's own work.

The ranks run everything but the model's layers, which return their tokens, so that all that is left is the hand-over.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import write_transformer
from devtools.mesh_runs import mesh_degrees

from .models import use_comfyui

SECTION = "bridge"
SHAPE = WanShape(dim=256, ffn_dim=256, num_layers=1, in_dim=48, out_dim=48)
LATENT = (1, 48, 13, 64, 64)
"""10.2 MB."""
TEXT_TOKENS = 512
RUNNER = "benchmarks.bridge:build_idle_runner"


def build_idle_runner(**arguments: Any) -> Any:
    """In a rank: the product's runner, whose model does nothing."""
    from workers.runner import PlaneRunner
    from workers.sampling import forward

    forward.forward_in_stages = lambda model, batches, **_: [batch.tokens for batch in batches]
    return PlaneRunner(**arguments)


@contextmanager
def calls(mesh: str, folder: Path) -> Iterator[Callable[[], Any]]:
    use_comfyui()
    from comfy_wan_dist.comfyui.patches import CarriedPatches
    from comfy_wan_dist.group.default import default_groups
    from comfy_wan_dist.jobs import forwards
    from comfy_wan_dist.jobs.handle import ModelHandle

    path = folder / "model.safetensors"
    write_transformer(path, SHAPE, seed=1)
    handle = ModelHandle(
        path=str(path),
        dtype="float32",
        mesh=mesh,
        devices=f"cpu:{mesh_degrees(mesh).world_size}",
        compile=False,
    )
    planes_for = forwards.planes_for

    def idle_planes(model: Any) -> tuple[LaunchSpec, ...]:
        return tuple(replace(spec, runner=RUNNER) for spec in planes_for(model))

    with mock.patch.object(forwards, "planes_for", idle_planes):
        try:
            yield forwards.SamplerRuns(handle, expert="high noise")(
                CarriedPatches(key=None, files=())
            )
        finally:
            default_groups().stop_all()


if __name__ == "__main__":
    import cProfile
    import logging
    import pstats
    import sys

    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder, calls(sys.argv[1], Path(folder)) as call:
        x = torch.randn(LATENT)
        t = torch.full((1,), 500.0)
        text = torch.randn(1, TEXT_TOKENS, 4096)
        call(x, t, text)
        base = call._seconds
        times = []
        outs = []
        for _ in range(30):
            started = time.perf_counter()
            out = call(x, t, text)
            times.append(time.perf_counter() - started)
        print("ms", sorted(1e3 * t for t in times)[::6], "ranks", 1e3 * (call._seconds - base) / 30)
        prof = cProfile.Profile()
        prof.enable()
        for _ in range(20):
            call(x, t, text)
        prof.disable()
        pstats.Stats(prof).sort_stats("cumtime").print_stats(25)
