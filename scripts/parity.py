"""Compare every mesh, and the whole path through ComfyUI, with independent references: `make parity`.

Five references, all in float32 on the CPU with equal seeded weights of the real architecture, in toy size but for the
last one:

    single             one process of this project: every mesh, every case, one forward and runs of 4 steps; and
                       calls of a MODEL, as ComfyUI's samplers make them, on every mesh that they may be laid on
    merged             a file with LoRAs merged in float64, on one process: every mesh with the same LoRAs to merge
    diffusers          its transformer and its VAE against this project's, on one process
    comfyui-ksampler   a stock KSampler against WanDistSampler in one real ComfyUI, same file, seed and latent, also
                       behind LoraLoaderModelOnly and WanDistLoRA
    comfyui-vae        stock VAEDecode, VAEEncode and Wan22ImageToVideoLatent against this project's nodes there, with
                       a VAE of full size, which makes a file of 2.8 GB that each side holds in memory

Writes out/parity.json, a list of rows {mesh, case, reference, max_abs_err, ref_max, limit}, and prints them as a
table. `limit` is relative: max_abs_err / ref_max must not exceed it; where it does, the exit status is 1.
Not covered: CUDA, 16-bit types, and weights that were trained.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.vae_shape import VAEConfig
from comfy_wan_dist.model_file.conditioning import TEXT_DIM
from comfy_wan_dist.model_file.conditioning import save as save_conditioning
from devtools.checkpoints import (
    TINY_TRANSFORMER,
    TINY_VAE,
    transformer_weights,
    vae_weights,
    write_vae,
)
from devtools.comfy_server import (
    PACK_FOLDER,
    TEST_PACK,
    ComfyServer,
    ComfyServerError,
    PromptResult,
    find_comfyui,
)
from devtools.forward_runs import PLANES, build_call, calls_rank, whole_velocity
from devtools.loras import Parts, merged, mixed_lora, plain_lora, spelled
from devtools.mesh_runs import (
    CASES,
    CPU,
    FORWARD_LIMIT,
    GUIDANCE,
    MANY_HEADS,
    MANY_HEADS_MESH,
    MESHES,
    RUN_LIMIT,
    SIZED_MESHES,
    SIZES,
    SOLVERS,
    TWO_HEADS,
    Case,
    Inputs,
    Schedule,
    forward_rank,
    lora_spec,
    matrix_rank,
    mesh_degrees,
    model_spec,
    sample_rank,
)
from devtools.rank_pool import RankPool
from devtools.references import build_diffusers_transformer, build_diffusers_vae
from devtools.vae_runs import load_vae, whole_share
from workers.vae.run import decode_chunks_into, encode_chunks_into, latent_size

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "out" / "parity.json"
DIFFUSERS_LIMIT = 1e-4
COMFYUI_LIMIT = 1e-3
COMFYUI_VAE_LIMIT = 1e-4
COMFYUI_MESHES = ("single", "cfg2-ulysses2")
RUN_TIMEOUT_S = 200.0
MODEL_NAME, VAE_NAME = "tiny_wan.safetensors", "tiny_wan_vae.safetensors"
FULL_VAE_NAME = "full_wan_vae.safetensors"


class ParityError(Exception):
    """A comparison could not be made; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison: largest difference, largest value of the reference, and the allowed ratio of the two."""

    mesh: str
    case: str
    reference: str
    max_abs_err: float
    ref_max: float
    limit: float

    @property
    def is_within(self) -> bool:
        return self.max_abs_err <= self.limit * self.ref_max  # false for NaN


def compare(
    actual: Tensor, expected: Tensor, *, mesh: str, case: str, reference: str, limit: float
) -> Row:
    if actual.shape != expected.shape:
        raise ParityError(
            f"{case} on {mesh}: shape {list(actual.shape)}, {reference} has {list(expected.shape)}"
        )
    if not bool(torch.isfinite(actual).all()) or not bool(expected.any()):
        raise ParityError(
            f"{case} on {mesh}: the result is not finite, or the reference is all zero"
        )
    return Row(
        mesh=mesh,
        case=case,
        reference=reference,
        max_abs_err=float((actual.double() - expected.double()).abs().max()),
        ref_max=float(expected.double().abs().max()),
        limit=limit,
    )


def main() -> int:
    """Run all comparisons; returns the exit status."""
    torch.set_num_threads(1)
    started = time.monotonic()
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            write_files(base)
            for row in all_rows(base):
                rows.append(row)
                show(row)
    except (ParityError, ComfyServerError, WanDistError, RuntimeError, OSError) as error:
        print(f"parity: failed: {error}", file=sys.stderr)
        return 1
    finally:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    excess = [row for row in rows if not row.is_within]
    print(
        f"parity: {len(rows)} rows, {len(excess)} over their limit, {time.monotonic() - started:.0f} s -> {REPORT}"
    )
    return 1 if excess else 0


def all_rows(base: Path) -> Iterator[Row]:
    spec = model_spec(base / "models" / "diffusion_models" / MODEL_NAME)
    with RankPool() as pool:
        yield from mesh_rows(pool, spec)
        yield from call_rows(pool, spec)
        yield from lora_rows(pool, spec, base)
        for shape, cases, meshes in (
            (TWO_HEADS, SIZES, SIZED_MESHES),
            (MANY_HEADS, (CASES[2],), (MANY_HEADS_MESH,)),
        ):
            path = base / "sized.safetensors"
            save_file(transformer_weights(shape, seed=1), path)
            yield from forward_rows(pool, model_spec(path), shape, cases, meshes)
    yield from diffusers_rows(spec, base / "models" / "vae" / VAE_NAME)
    yield from comfyui_rows(base)


def write_files(base: Path) -> None:
    """ComfyUI's base folder with both models, two LoRAs and two prompts."""
    for name in ("models/diffusion_models", "models/vae", "models/loras", "input"):
        (base / name).mkdir(parents=True)
    for name, parts, _ in lora_chain():
        save_file(spelled(parts, "comfyui"), base / "models" / "loras" / name)
    save_file(
        transformer_weights(TINY_TRANSFORMER, seed=1),
        base / "models" / "diffusion_models" / MODEL_NAME,
    )
    write_vae(base / "models" / "vae" / VAE_NAME, TINY_VAE, seed=2)
    write_vae(base / "models" / "vae" / FULL_VAE_NAME, VAEConfig(), seed=2)
    generator = torch.Generator().manual_seed(3)
    for name in ("positive", "negative"):
        save_conditioning(
            base / "input" / f"{name}.safetensors",
            torch.randn(1, 512, TEXT_DIM, generator=generator),
        )


def show(row: Row) -> None:
    verdict = "ok" if row.is_within else "OVER THE LIMIT"
    ratio = row.max_abs_err / row.ref_max
    print(
        f"{row.mesh:18} {row.case:45} {row.reference:17} {ratio:8.1e} of {row.limit:.0e}  {verdict}",
        flush=True,
    )


# ---- meshes against one process --------------------------------------------------------------------------------


def mesh_rows(pool: RankPool, spec: ModelSpec) -> Iterator[Row]:
    expected: dict[str, Tensor] = {}
    for mesh in MESHES:
        world_size = mesh_degrees(mesh).world_size
        results = pool.run(
            world_size, matrix_rank, mesh, spec, CASES, SOLVERS, timeout_s=RUN_TIMEOUT_S
        )[0]
        if mesh == "single":
            expected = results
            continue
        for case, result in results.items():
            limit = FORWARD_LIMIT if case.endswith("one forward") else RUN_LIMIT
            yield compare(
                result, expected[case], mesh=mesh, case=case, reference="single", limit=limit
            )


def call_rows(pool: RankPool, spec: ModelSpec) -> Iterator[Row]:
    """Two calls of a MODEL in one plane, with other texts and sizes."""
    expected: list[Tensor] = []
    for plane, mesh in PLANES:
        calls = tuple(
            build_call(TINY_TRANSFORMER, mesh, texts=texts, size=size)
            for texts, size in (("abab", (3, 6, 6)), ("cbac", (3, 5, 7)))
        )
        ranks = mesh_degrees(plane).world_size
        parts = pool.run(ranks, calls_rank, plane, spec, calls, timeout_s=RUN_TIMEOUT_S)
        results = [whole_velocity(each) for each in zip(*parts, strict=True)]
        if plane == "single":
            expected = results
            continue
        for name, result, single in zip(("first", "second"), results, expected, strict=True):
            yield compare(
                result,
                single,
                mesh=mesh,
                case=f"MODEL, {name} call, started for {plane}",
                reference="single",
                limit=FORWARD_LIMIT,
            )


def forward_rows(
    pool: RankPool,
    spec: ModelSpec,
    shape: WanShape,
    cases: tuple[Case, ...],
    meshes: tuple[str, ...],
) -> Iterator[Row]:
    """One forward of every case on every mesh, for sizes at which more would take too long."""
    for case in cases:
        inputs = case.inputs(shape)

        def velocity(mesh: str, inputs: Inputs = inputs) -> Tensor:
            ranks = mesh_degrees(mesh).world_size
            runs = pool.run(ranks, forward_rank, mesh, spec, inputs, timeout_s=RUN_TIMEOUT_S)
            return runs[0].velocity

        expected = velocity("single")
        for mesh in meshes:
            yield compare(
                velocity(mesh),
                expected,
                mesh=mesh,
                case=f"{case.name}, {shape.num_heads} heads, one forward",
                reference="single",
                limit=FORWARD_LIMIT,
            )


def lora_chain() -> tuple[tuple[str, Parts, float], ...]:
    """File name, content and strength of two LoRAs with all kinds of changes that ComfyUI makes too.

    ComfyUI leaves out what a file says of the modulations, which are no leaf module's.
    """
    shapes = expected_parameters(TINY_TRANSFORMER)
    mixed = mixed_lora(shapes, seed=5)
    mixed = {name: parts for name, parts in mixed.items() if not name.endswith("modulation")}
    return (
        ("mixed.safetensors", mixed, 0.8),
        ("plain.safetensors", plain_lora(shapes, seed=6), -0.5),
    )


def lora_rows(pool: RankPool, spec: ModelSpec, base: Path) -> Iterator[Row]:
    """One step of a batch on every mesh."""
    chain = lora_chain()
    path = base / "merged.safetensors"
    weights = transformer_weights(TINY_TRANSFORMER, seed=1)
    save_file(merged(weights, *((parts, strength) for _, parts, strength in chain)), path)
    case, schedule = CASES[-1], Schedule(solver="euler", sigmas=(0.7, 0.0), guidance=GUIDANCE)
    inputs = case.inputs(TINY_TRANSFORMER)

    def result(mesh: str, model: ModelSpec) -> Tensor:
        ranks = mesh_degrees(mesh).world_size
        runs = pool.run(ranks, sample_rank, mesh, model, inputs, schedule, timeout_s=RUN_TIMEOUT_S)
        return runs[0][0]

    expected = result("single", model_spec(path))
    loras = tuple(
        lora_spec(base / "models" / "loras" / name, strength) for name, _, strength in chain
    )
    for mesh in MESHES:
        yield compare(
            result(mesh, replace(spec, loras=loras)),
            expected,
            mesh=mesh,
            case=f"two LoRAs, {case.name}, one step",
            reference="merged",
            limit=FORWARD_LIMIT,
        )


# ---- diffusers -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def diffusers_rows(spec: ModelSpec, vae_path: Path) -> Iterator[Row]:
    reference = build_diffusers_transformer(
        TINY_TRANSFORMER, transformer_weights(TINY_TRANSFORMER, seed=1)
    )
    for case in CASES:
        yield compare(
            own_forward(spec, case),
            diffusers_forward(reference, case),
            mesh="single",
            case=f"{case.name}, one forward",
            reference="diffusers",
            limit=DIFFUSERS_LIMIT,
        )
    vae, _ = load_vae(str(vae_path), dtype=torch.float32, device=CPU)
    reference = build_diffusers_vae(TINY_VAE, vae_weights(TINY_VAE, seed=2))
    generator = torch.Generator().manual_seed(4)

    latent = torch.randn(1, TINY_VAE.z_dim, 3, 4, 6, generator=generator)
    frames = torch.empty(9, 64, 96, 3)
    share = whole_share(latent_size(latent))
    for _ in decode_chunks_into(vae, latent, frames, share=share, device=CPU):
        pass
    decoded = (reference.decode(latent).sample[0].permute(1, 2, 3, 0) + 1) / 2
    yield compare(
        frames,
        decoded,
        mesh="single",
        case="VAE decode",
        reference="diffusers",
        limit=DIFFUSERS_LIMIT,
    )

    frames = torch.rand(9, 64, 96, 3, generator=generator)
    pixels = frames.permute(3, 0, 1, 2).unsqueeze(0) * 2 - 1
    encoded = reference.encode(pixels).latent_dist.mode()
    latent = torch.empty_like(encoded)
    for _ in encode_chunks_into(vae, frames, latent, share=share, device=CPU):
        pass
    yield compare(
        latent,
        encoded,
        mesh="single",
        case="VAE encode",
        reference="diffusers",
        limit=DIFFUSERS_LIMIT,
    )


def own_forward(spec: ModelSpec, case: Case) -> Tensor:
    return forward_rank(0, "single", spec, case.inputs(TINY_TRANSFORMER, is_guided=False)).velocity


def diffusers_forward(reference: Any, case: Case) -> Tensor:
    inputs = case.inputs(TINY_TRANSFORMER, is_guided=False)
    batch, _, _, height, width = inputs.noisy.shape
    x, timesteps = inputs.noisy, torch.full((batch,), 700.0)
    if inputs.clean is not None and inputs.mask is not None and inputs.frame_mask is not None:
        x = x * inputs.mask + inputs.clean * (1 - inputs.mask)
        per_frame = (height + 1) // 2 * ((width + 1) // 2)
        timesteps = (700.0 * inputs.frame_mask).repeat_interleave(per_frame, dim=1)
    # diffusers would leave out the last row and column of odd sides, where ComfyUI repeats the first.
    x = torch.nn.functional.pad(x, (0, width % 2, 0, height % 2, 0, 0), mode="circular")
    velocity: Tensor = reference(x, timesteps, inputs.cond.expand(batch, -1, -1)).sample
    return velocity[..., :height, :width]


# ---- ComfyUI ---------------------------------------------------------------------------------------------------

ComfyUIRun = tuple[str, str, str, float, int, float, float]
# (case, sampler, scheduler, shift, steps, cfg, denoise). At 20 steps ComfyUI's uni_pc is already
# the work of float32 rounding as much as of its formulas.
COMFYUI_RUNS = tuple(
    (case, sampler, "simple", shift, steps, 5.0, 1.0)
    for case in ("text-to-video", "image-to-video", "first-last-frame")
    for sampler, shift, steps in (("euler", 5.0, 6), ("uni_pc", 8.0, 20))
)


def comfyui_rows(base: Path) -> Iterator[Row]:
    """Stock nodes and this project's, all in one ComfyUI over HTTP."""
    server = ComfyServer(
        comfyui=find_comfyui(ROOT),
        base=base,
        packs={PACK_FOLDER: ROOT, "test-pack": TEST_PACK},
        extra_args=("--force-fp32", "--fp32-vae"),
    )
    with server:
        server.upload_image("start.png", start_image())
        yield from sampler_rows(server)
        yield from vae_rows(server)


def run_graph(server: ComfyServer, graph: dict[str, Any]) -> PromptResult:
    result = server.run(graph, timeout_s=RUN_TIMEOUT_S)
    if result.status != "success":
        raise ParityError(f"ComfyUI ended a graph with {result.status}\n{result.error}")
    return result


def sampler_rows(server: ComfyServer) -> Iterator[Row]:
    """A stock KSampler once, this project's once for each mesh."""
    for mesh, has_loras in itertools.product(COMFYUI_MESHES, (False, True)):
        runs = COMFYUI_RUNS[:1] if has_loras else COMFYUI_RUNS
        result = run_graph(server, comfyui_graph(mesh, runs, has_loras=has_loras))
        for index, (case, sampler, scheduler, _, steps, _, _) in enumerate(runs):
            stock, own = (
                load_tensors(server.view(result.outputs[f"save_{kind}_{index}"]["latents"][0]))[
                    "latent_tensor"
                ]
                for kind in ("stock", "own")
            )
            yield compare(
                own,
                stock,
                mesh=mesh,
                case=f"{case}, {'two LoRAs, ' * has_loras}{sampler}, {scheduler}, {steps} steps",
                reference="comfyui-ksampler",
                limit=COMFYUI_LIMIT,
            )


def comfyui_graph(mesh: str, runs: tuple[ComfyUIRun, ...], *, has_loras: bool) -> dict[str, Any]:
    """Every run by a KSampler and by a WanDistSampler, from one file, latent and seed."""
    graph = {
        "stock_model": node("UNETLoader", unet_name=MODEL_NAME, weight_dtype="default"),
        "own_model": own_model(mesh),
        "image": node("LoadImage", image="start.png"),
    }
    stock, own = "stock_model", "own_model"
    for name, _, strength in lora_chain() if has_loras else ():
        graph[f"stock {name}"] = node(
            "LoraLoaderModelOnly", model=[stock, 0], lora_name=name, strength_model=strength
        )
        graph[f"own {name}"] = node(
            "WanDistLoRA", model=[own, 0], lora_name=name, strength=strength
        )
        stock, own = f"stock {name}", f"own {name}"
    for name in ("positive", "negative"):
        graph[name] = node("WanDistLoadConditioning", file=f"{name}.safetensors [input]")
    size = {"width": 96, "height": 96, "length": 9, "batch_size": 1}
    start, end = {"start_image": ["image", 0]}, {"end_image": ["image", 0]}
    for case, given in (
        ("text-to-video", {}),
        ("image-to-video", start),
        ("first-last-frame", {**start, **end}),
    ):
        graph[case] = node(
            "WanDistImageToVideoLatent",
            model=["own_model", 0],
            vae_name=VAE_NAME,
            vae_dtype="float32",
            **size,
            **given,
        )
    for index, (case, sampler, scheduler, shift, steps, cfg, denoise) in enumerate(runs):
        common = {
            "positive": ["positive", 0],
            "negative": ["negative", 0],
            "latent_image": [case, 0],
            "seed": 42,
            "steps": steps,
            "cfg": cfg,
            "sampler_name": sampler,
            "scheduler": scheduler,
            "denoise": denoise,
        }
        graph[f"shift_{index}"] = node("ModelSamplingSD3", model=[stock, 0], shift=shift)
        graph[f"stock_{index}"] = node("KSampler", model=[f"shift_{index}", 0], **common)
        graph[f"own_{index}"] = node("WanDistSampler", model=[own, 0], shift=shift, **common)
        for kind in ("stock", "own"):
            graph[f"save_{kind}_{index}"] = node(
                "SaveLatent", samples=[f"{kind}_{index}", 0], filename_prefix=f"{kind}_{index}"
            )
    return graph


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def own_model(mesh: str) -> dict[str, Any]:
    return node(
        "WanDistLoadModel",
        model_name=MODEL_NAME,
        dtype="float32",
        mesh=mesh,
        devices=f"cpu:{mesh_degrees(mesh).world_size}",
        compile=False,
    )


def start_image() -> bytes:
    """A PNG of seeded noise."""
    return animation(frames=1, height=96, width=96)


def animation(*, frames: int, height: int, width: int) -> bytes:
    """A PNG of seeded noise, animated if there are several frames."""
    pixels = torch.randint(
        0,
        256,
        (frames, height, width, 3),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(5),
    )
    first, *others = (Image.fromarray(frame.numpy()) for frame in pixels)
    file = io.BytesIO()
    first.save(file, "PNG", save_all=bool(others), append_images=others)
    return file.getvalue()


# ---- ComfyUI's VAE, in full size -------------------------------------------------------------------------------

VAE_SIZE = {"width": 96, "height": 64, "length": 9}
VAE_FRAMES = 10  # one more than goes into the video


def vae_rows(server: ComfyServer) -> Iterator[Row]:
    """Decode and encode on one rank, and the whole start latent of an image and of frames of another size."""
    server.upload_image("frames.png", animation(frames=VAE_FRAMES, height=64, width=96))
    server.upload_image("small.png", animation(frames=6, height=56, width=48))
    write_latent(server.base / "input" / "seeded.latent")
    result = run_graph(server, vae_graph())

    def saved(name: str) -> dict[str, Tensor]:
        return load_tensors(server.view(result.outputs[f"saved {name}"]["tensors"][0]))

    row = functools.partial(compare, mesh="single", reference="comfyui-vae")
    for case, key in (
        ("decode", "images"),
        ("encode", "samples"),
        ("start image", "samples"),
        ("start frames", "samples"),
    ):
        own, stock = saved(f"own {case}"), saved(f"stock {case}")
        label = f"full-size VAE, {case}"
        yield row(own[key], stock[key], case=label, limit=COMFYUI_VAE_LIMIT)
        if "noise_mask" in stock:
            yield row(own["noise_mask"], stock["noise_mask"], case=f"{label}, mask", limit=0.0)


def write_latent(path: Path) -> None:
    """A seeded latent for LoadLatent, of which few pixels are cut off at the range's ends."""
    shape = (
        1,
        48,
        (VAE_SIZE["length"] - 1) // 4 + 1,
        VAE_SIZE["height"] // 16,
        VAE_SIZE["width"] // 16,
    )
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    # ComfyUI's mark for a latent that is not to be scaled.
    save_file({"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}, path)


def vae_graph() -> dict[str, Any]:
    own = {"vae_name": FULL_VAE_NAME, "vae_dtype": "float32", "model": ["own_model", 0]}
    graph = {
        "own_model": own_model("single"),
        "stock_vae": node("VAELoader", vae_name=FULL_VAE_NAME),
        "latent": node("LoadLatent", latent="seeded.latent"),
        "frames": node("LoadImage", image="frames.png"),
        "small": node("LoadImage", image="small.png"),
        "first": node("ImageFromBatch", image=["small", 0], batch_index=0, length=1),
        "stock decode": node("VAEDecode", samples=["latent", 0], vae=["stock_vae", 0]),
        "own decode": node("WanDistVAEDecode", samples=["latent", 0], **own),
        # This project encodes whatever is given as the start of a video.
        "stock encode": node("VAEEncode", pixels=["frames", 0], vae=["stock_vae", 0]),
        "own encode": node(
            "WanDistImageToVideoLatent",
            start_image=["frames", 0],
            batch_size=1,
            **VAE_SIZE,
            **own,
        ),
    }
    for case, images in (("start image", "first"), ("start frames", "small")):
        start = {"start_image": [images, 0], "batch_size": 2, **VAE_SIZE}
        graph[f"stock {case}"] = node("Wan22ImageToVideoLatent", vae=["stock_vae", 0], **start)
        graph[f"own {case}"] = node("WanDistImageToVideoLatent", **start, **own)
    for name in [name for name in graph if name.startswith(("stock ", "own "))]:
        kind = "images" if name.endswith("decode") else "latent"
        graph[f"saved {name}"] = node("SaveTensors", **{kind: [name, 0]})
    return graph


if __name__ == "__main__":
    sys.exit(main())
