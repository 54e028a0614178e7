"""Measure the model on one CUDA GPU and write one JSON: `benchmarks/gpu.sh [--tiny] [--out FOLDER]`.

    matmul    the rate of a large bf16 product: what the other rates are set against
    parity    a small model and a small VAE on the GPU, fp32 (no TF32) and bf16, against the CPU in fp32
    forward   one bf16 forward of Wan2.2 TI2V-5B at 704x1280, 121 frames, with random weights; its longest kernels
    vae       decoding that video whole, from a latent to pictures in host memory as a job does, with random weights
    load      a bf16 checkpoint of full width and few blocks from disk and from the page cache
    compiled  the forward with torch.compile

Every part runs for itself, within its own time, and the file is written anew after each: what fails or hangs costs
only itself. Not covered: more than one GPU, quality, ComfyUI. --tiny runs all parts with tiny sizes on any device,
the CPU included, to test this file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from types import FrameType

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from comfy_wan_dist.mesh.vae_shape import VAE_STRIDE, VAEConfig, pixel_frames
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.wan import read_wan_file
from devtools.checkpoints import TINY_TRANSFORMER, TINY_VAE, transformer_weights, vae_weights
from devtools.mesh_runs import single_groups
from devtools.reading import pass_by, read_alone
from devtools.vae_runs import decode, whole_share
from workers.checkpoint.load import load_weights
from workers.model.wan import WanModel
from workers.parallel.compile import compile_blocks
from workers.parallel.parallelize import cut_model
from workers.sampling.forward import (
    ForwardInputs,
    PromptTensors,
    build_forward,
    prepare_forward,
)
from workers.vae.run import decode_chunks_into, latent_size
from workers.vae.wan22 import WanVAE

RESULTS = Path(__file__).resolve().parent / "results"
TOTAL_S = 450.0
PACKAGES = ("torch", "triton", "einops", "safetensors", "accelerate", "numpy")
TEXT_TOKENS = 512
TIMESTEP = 750.0
GIB = 2**30

logger = logging.getLogger(__name__)

Result = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the parts run; shapes as in WanShape, grids in tokens, repeats of each timing."""

    transformer: WanShape
    grid: LatentGrid
    load_blocks: int
    vae: VAEConfig
    matmul: int
    repeats: int


FULL = Sizes(
    transformer=WanShape(dim=3072, ffn_dim=14336, num_layers=30, in_dim=48, out_dim=48),
    grid=LatentGrid(frames=31, rows=22, columns=40),
    load_blocks=6,
    vae=VAEConfig(),
    matmul=8192,
    repeats=3,
)
TINY = Sizes(
    transformer=TINY_TRANSFORMER,
    grid=LatentGrid(frames=3, rows=2, columns=3),
    load_blocks=2,
    vae=TINY_VAE,
    matmul=128,
    repeats=1,
)
PARITY_GRID = LatentGrid(frames=5, rows=6, columns=7)
PARITY_LIMITS = {
    ("transformer", torch.float32): 1e-4,
    ("transformer", torch.bfloat16): 5e-2,
    ("vae", torch.float32): 1e-4,
    ("vae", torch.bfloat16): 1e-1,
}
"""Largest difference, as a part of the largest value."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The device, the sizes, and what earlier parts found that later ones need."""

    device: torch.device
    sizes: Sizes
    parts: dict[str, Result]

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of `run` over the repeats, after one run that is not counted."""
        run()
        taken = []
        for _ in range(self.sizes.repeats):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return median(taken)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_gib(self) -> float | None:
        """Most memory that torch held since the part began."""
        if self.device.type != "cuda":
            return None
        return round(torch.cuda.max_memory_allocated(self.device) / GIB, 2)

    def matmul_rate(self) -> float | None:
        """FLOP/s of part "matmul", if it went well."""
        rate = self.parts.get("matmul", {}).get("tflops")
        return rate * 1e12 if isinstance(rate, float) else None


# ---- parts


def measure_matmul(bench: Bench) -> Result:
    n = bench.sizes.matmul
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)
    b = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)

    def run() -> None:
        for _ in range(10):
            torch.mm(a, b)

    seconds = bench.seconds(run) / 10
    return {"shape": [n, n, n], "dtype": "bfloat16", "tflops": round(2 * n**3 / seconds / 1e12, 1)}


def measure_parity(bench: Bench) -> Result:
    """Outputs on the device against the CPU in float32, with the same weights and inputs."""
    cpu = torch.device("cpu")
    weights = transformer_weights(TINY_TRANSFORMER, seed=1)
    vae_values = vae_weights(TINY_VAE, seed=1)

    def velocity(device: torch.device, dtype: torch.dtype) -> Tensor:
        model = cut_model(TINY_TRANSFORMER, single_groups(), dtype=dtype, device=device)
        model.load_state_dict(weights)
        return _build_forward(model, PARITY_GRID, device)()

    def pixels(device: torch.device, dtype: torch.dtype) -> Tensor:
        vae = WanVAE(TINY_VAE)
        vae.load_state_dict(vae_values)
        latent = torch.randn(1, 48, 3, 4, 6, generator=torch.Generator().manual_seed(2))
        return decode(vae.to(device, dtype), latent.to(device))

    result: Result = {"reference": "cpu float32", "tf32": False}
    runs = {"transformer": velocity, "vae": pixels}
    for (name, dtype), limit in PARITY_LIMITS.items():
        expected = runs[name](cpu, torch.float32)
        actual = runs[name](bench.device, dtype).float().cpu()
        error = float((actual - expected).abs().max() / expected.abs().max())
        label = f"{name} {str(dtype).removeprefix('torch.')}"
        result[label] = {"relative_error": error, "limit": limit, "ok": error <= limit}
    return result


def measure_forward(bench: Bench) -> Result:
    sizes = bench.sizes
    forward = _build_forward(_random_transformer(bench), sizes.grid, bench.device)
    seconds = bench.seconds(forward)
    return {**_forward_result(bench, seconds), "kernels": _longest_kernels(bench, forward)}


def measure_compiled(bench: Bench) -> Result:
    model = _random_transformer(bench)
    forward = _build_forward(model, bench.sizes.grid, bench.device)
    expected = forward()
    compile_blocks(model)
    start = time.perf_counter()
    actual = forward()
    bench.synchronize()
    compile_s = time.perf_counter() - start
    error = float((actual - expected).abs().max() / expected.abs().max())
    seconds = bench.seconds(forward)
    return {
        **_forward_result(bench, seconds),
        "first_call_s": round(compile_s, 1),
        "relative_difference_to_eager": error,
    }


def measure_vae(bench: Bench) -> Result:
    grid = bench.sizes.grid
    with bench.device:
        vae = WanVAE(bench.sizes.vae).to(torch.bfloat16)
    _fill_randomly(vae)
    vae.arrange_weights()
    latent = torch.randn(1, vae.config.z_dim, grid.frames, 2 * grid.rows, 2 * grid.columns)
    share = whole_share(latent_size(latent))
    height, width = (VAE_STRIDE * size for size in latent.shape[3:])
    # Zeros written, not asked for: the kernel gives pages at the first touch.
    frames = torch.empty(pixel_frames(grid.frames), height, width, 3).fill_(0)

    def decode(count: int) -> list[float]:
        """Seconds of each chunk, its pictures' way to the host included."""
        taken = []
        chunks = decode_chunks_into(vae, latent, frames, share=share, device=bench.device)
        for _ in range(count):
            start = time.perf_counter()
            next(chunks)
            bench.synchronize()
            taken.append(time.perf_counter() - start)
        return taken

    decode(2)
    taken = decode(grid.frames)
    return {
        "frames": frames.shape[0],
        "height": height,
        "width": width,
        "dtype": "bfloat16",
        "seconds": sum(taken),
        "first_chunk_s": taken[0],
        "later_chunk_s": median(taken[1:]),
        "slowest_chunk_s": max(taken),
        "peak_gib": bench.peak_gib(),
    }


def measure_load(bench: Bench) -> Result:
    full = bench.sizes.transformer
    shape = WanShape(
        dim=full.dim,
        ffn_dim=full.ffn_dim,
        num_layers=bench.sizes.load_blocks,
        in_dim=full.in_dim,
        out_dim=full.out_dim,
        text_dim=full.text_dim,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(
            {
                name: torch.randn(size, device=bench.device, dtype=torch.bfloat16).cpu()
                for name, size in expected_parameters(shape).items()
            },
            path,
        )
        size = path.stat().st_size
        _forget_pages(path)
        cold, warm = _load_seconds(bench, path), _load_seconds(bench, path)
    return {
        "file_gb": size / 1e9,
        "blocks": shape.num_layers,
        "dtype": "bfloat16",
        "from_disk_gb_per_s": size / 1e9 / cold,
        "from_page_cache_gb_per_s": size / 1e9 / warm,
        "peak_gib": bench.peak_gib(),
    }


PARTS: dict[str, tuple[Callable[[Bench], Result], float]] = {
    "matmul": (measure_matmul, 30.0),
    "parity": (measure_parity, 60.0),
    "forward": (measure_forward, 90.0),
    "vae": (measure_vae, 100.0),
    "load": (measure_load, 90.0),
    "compiled": (measure_compiled, 180.0),
}
"""In order; seconds each may take. What matters most comes first: the total may run out."""


# ---- what the parts share


def forward_flops(shape: WanShape, tokens: int) -> float:
    """Multiply-adds of all blocks, times 2. The text's keys and values are computed once per prompt: not in here."""
    d, n = shape.dim, tokens
    projections = 12 * n * d * d  # q, k, v, o of self-attention; q, o of cross-attention
    products = 4 * n * n * d + 4 * n * TEXT_TOKENS * d
    return float(shape.num_layers * (projections + products + 4 * n * d * shape.ffn_dim))


def _forward_result(bench: Bench, seconds: float) -> Result:
    sizes, rate = bench.sizes, bench.matmul_rate()
    flops = forward_flops(sizes.transformer, sizes.grid.tokens)
    return {
        "dim": sizes.transformer.dim,
        "ffn_dim": sizes.transformer.ffn_dim,
        "blocks": sizes.transformer.num_layers,
        "tokens": sizes.grid.tokens,
        "dtype": "bfloat16",
        "seconds": seconds,
        "tflop": flops / 1e12,
        "tflops": flops / seconds / 1e12,
        "of_matmul_rate": flops / seconds / rate if rate else None,
        "peak_gib": bench.peak_gib(),
    }


def _random_transformer(bench: Bench) -> WanModel:
    model = cut_model(
        bench.sizes.transformer, single_groups(), dtype=torch.bfloat16, device=bench.device
    )
    _fill_randomly(model)
    return model


def _fill_randomly(module: nn.Module) -> None:
    """Weights of such a size that activations keep theirs; norms near one."""
    for name, parameter in module.named_parameters():
        if "norm" in name or name.endswith("gamma"):
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            fan_in = parameter[0].numel() if parameter.dim() > 1 else parameter.numel()
            parameter.normal_(0.0, fan_in**-0.5)


def _build_forward(model: WanModel, grid: LatentGrid, device: torch.device) -> Callable[[], Tensor]:
    """A forward of an image-to-video step: the first frame has a timestep of its own."""
    generator = torch.Generator().manual_seed(0)
    shape = model.shape
    size = (1, shape.out_dim, grid.frames, 2 * grid.rows, 2 * grid.columns)
    latent = torch.randn(size, generator=generator)
    text = torch.randn(1, TEXT_TOKENS, shape.text_dim, generator=generator)
    frame_mask = torch.ones(1, grid.frames)
    frame_mask[:, 0] = 0
    given = ForwardInputs(
        latent=latent,
        cond=PromptTensors(text=text, conditions={}),
        uncond=None,
        frame_factors=frame_mask,
    )
    inputs = prepare_forward(given, shape, single_groups(), device)
    x = inputs.shard(latent)
    forward = build_forward(model, inputs, guidance=None)
    return lambda: forward.predict(x, TIMESTEP)


def _longest_kernels(bench: Bench, run: Callable[[], object], count: int = 15) -> list[Result]:
    """The kernels that take longest in one run, in milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    is_cuda = bench.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as trace:
        run()
        bench.synchronize()
    times = [
        (event.self_device_time_total if is_cuda else event.self_cpu_time_total, event)
        for event in trace.key_averages()
    ]
    times.sort(key=lambda pair: pair[0], reverse=True)
    return [
        {"name": event.key[:120], "calls": event.count, "ms": round(microseconds / 1e3, 3)}
        for microseconds, event in times[:count]
    ]


def _load_seconds(bench: Bench, path: Path) -> float:
    """From the file's path to weights on the device."""
    start = time.perf_counter()
    file = read_wan_file(read_model_file(str(path)))
    groups = single_groups()
    model = cut_model(file.shape, groups, dtype=torch.bfloat16, device=bench.device)
    load_weights(model, file, groups, sharing=read_alone(), milestone=pass_by)
    bench.synchronize()
    return time.perf_counter() - start


def _forget_pages(path: Path) -> None:
    """Have the kernel drop the file's cached pages, as far as it will."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


# ---- the run


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when `seconds` are over; a native call that hangs is let finish first."""

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_part(
    bench: Bench, measure: Callable[[Bench], Result], *, budget_s: float, left_s: float
) -> Result:
    """The part's result, or its error; never raises but for an interrupt."""
    if left_s <= 0:
        return {"error": "skipped: no time left"}
    start = time.perf_counter()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    try:
        with time_limit(min(budget_s, left_s)), torch.inference_mode():
            result = measure(bench)
    except Exception:
        result = {"error": traceback.format_exc()[-4000:]}
    return {**result, "part_s": round(time.perf_counter() - start, 1)}


def describe_machine(device: torch.device) -> Result:
    found: Result = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["memory_gib"] = round(properties.total_memory / GIB, 1)
        found["capability"] = f"{properties.major}.{properties.minor}"
    else:
        found["device"] = "cpu"
    return found


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 if any part failed or any parity limit is missed, 2 without a device."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU if need be")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not options.tiny and not torch.cuda.is_available():
        logger.error("no CUDA device is there; --tiny tests this on the CPU")
        return 2
    deadline = time.monotonic() + TOTAL_S
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    machine = describe_machine(device)
    now = datetime.now(timezone.utc)
    name = re.sub(r"[^a-z0-9]+", "-", str(machine["device"]).lower()).strip("-")
    path: Path = options.out / f"{name}-{now:%Y%m%dT%H%M%SZ}.json"
    bench = Bench(device=device, sizes=TINY if options.tiny else FULL, parts={})
    report = {
        "utc": now.isoformat(timespec="seconds"),
        "is_tiny": options.tiny,
        "machine": machine,
        "parts": bench.parts,
    }
    for part, (measure, budget_s) in PARTS.items():
        left_s = deadline - time.monotonic()
        # What the file says if this part takes the process with it.
        bench.parts[part] = {"error": "did not return"}
        write_report(path, report)
        bench.parts[part] = run_part(bench, measure, budget_s=budget_s, left_s=left_s)
        write_report(path, report)
        logger.info("%s: %s", part, json.dumps(bench.parts[part]))
    logger.info("written to %s", path)
    return 1 if any(has_failed(result) for result in bench.parts.values()) else 0


def has_failed(result: Result) -> bool:
    """Whether a part raised or one of its limits is missed."""
    verdicts = [value["ok"] for value in result.values() if isinstance(value, dict)]
    return "error" in result or not all(verdicts)


def write_report(path: Path, report: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(report, indent=1) + "\n")
    scratch.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
