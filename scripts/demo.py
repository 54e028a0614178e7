"""Make a small video through a real ComfyUI and a worker group of several ranks: `make demo`.

Covered: a seeded checkpoint of the real architecture but of toy size, its VAE, a start image and
two prompt embeddings are written below out/demo; a headless ComfyUI with this pack runs
example_workflows/api/demo.json on a mesh of guidance and context parallelism; the video is copied
to out/demo.mp4. Its ranks run on all GPUs where there are four or more, else on the CPU. Not
covered: pictures worth looking at: the weights are random, so the video is noise.

The last line of the output is one JSON object; frames, width and height in it are read from the
video, ranks from the log of the worker group.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import torch
from PIL import Image, ImageDraw, ImageFilter
from safetensors.torch import save_file

from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.mesh.choice import choose_mesh
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.vae_shape import VAEConfig
from comfy_wan_dist.model_file.conditioning import TEXT_DIM, save
from devtools.checkpoints import transformer_weights, write_vae
from devtools.comfy_server import PACK_FOLDER, ComfyServer, ComfyServerError, Event, find_comfyui

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"
BASE = OUT / "demo"
VIDEO = OUT / "demo.mp4"
WORKFLOW = ROOT / "example_workflows" / "api" / "demo.json"

TRANSFORMER = WanShape(dim=512, ffn_dim=1024, num_layers=4, in_dim=48, out_dim=48)
VAE = VAEConfig(z_dim=48, encoder_dim=16, decoder_dim=16)
TEXT_TOKENS = 512
SEED = 42
MIN_GPUS = 4
RUN_TIMEOUT_S = 300.0
INPUT_SIZE = (512, 320)


class DemoError(Exception):
    """The demo did not come to its end; the message says why."""


def main() -> int:
    """Run the demo; returns the exit status."""
    started = time.monotonic()
    try:
        prompt = json.loads(WORKFLOW.read_text(encoding="utf-8"))
        loader = inputs_of(prompt, "WanDistLoadModel")
        use_gpu = use_gpus_if_enough(loader)
        say(f"mesh {loader['mesh']} on {loader['devices']}")
        say("the model is tiny and its weights are random, so the video will be noise")
        write_files(prompt)
        summary = make_video(prompt, mesh=loader["mesh"], use_gpu=use_gpu)
    except (DemoError, ComfyServerError, WanDistError, av.FFmpegError, OSError) as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    summary["seconds"] = round(time.monotonic() - started, 1)
    summary["weights"] = "random"
    print(json.dumps(summary), flush=True)
    return 0


def use_gpus_if_enough(loader: dict[str, Any]) -> bool:
    """Spread the model over all GPUs, if there are enough, as the mesh `auto` would."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < MIN_GPUS:
        return False
    loader["mesh"] = str(choose_mesh(TRANSFORMER, device_count=gpus, guided=True))
    loader["devices"] = "all"
    return True


def write_files(prompt: Mapping[str, Any]) -> None:
    """Everything that the workflow names, below BASE."""
    shutil.rmtree(BASE, ignore_errors=True)
    VIDEO.unlink(missing_ok=True)
    folders = {name: BASE / name for name in ("models/diffusion_models", "models/vae", "input")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    loader = inputs_of(prompt, "WanDistLoadModel")
    latent = inputs_of(prompt, "WanDistImageToVideoLatent")

    weights = transformer_weights(TRANSFORMER, seed=SEED)
    save_file(weights, folders["models/diffusion_models"] / loader["model_name"])
    write_vae(folders["models/vae"] / latent["vae_name"], VAE, seed=SEED + 1)
    start_image().save(folders["input"] / inputs_of(prompt, "LoadImage")["image"])
    generator = torch.Generator().manual_seed(SEED + 2)
    for node in prompt.values():
        if node["class_type"] == "WanDistLoadConditioning":
            embedding = torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=generator)
            save(folders["input"] / node["inputs"]["file"].removesuffix(" [input]"), embedding)
    parameters = sum(weight.numel() for weight in weights.values())
    say(f"wrote a transformer of {parameters / 1e6:.0f} M parameters, its VAE and inputs to {BASE}")


def start_image() -> Image.Image:
    """Hills under an evening sky."""
    width, height = INPUT_SIZE
    picture = Image.new("RGB", INPUT_SIZE)
    draw = ImageDraw.Draw(picture)
    top, bottom = (52, 78, 140), (250, 176, 120)
    for y in range(height):
        part = min(1.0, 1.4 * y / height)
        color = tuple(round(a + (b - a) * part) for a, b in zip(top, bottom, strict=True))
        draw.line([(0, y), (width, y)], fill=color)
    draw.ellipse([330, 120, 400, 190], fill=(255, 238, 190))
    for color, ridge in (
        ((120, 92, 130), [(0, 210), (110, 140), (230, 215), (340, 165), (512, 225)]),
        ((66, 62, 98), [(0, 260), (150, 205), (300, 262), (420, 215), (512, 250)]),
        ((30, 36, 58), [(0, 300), (200, 262), (380, 298), (512, 275)]),
    ):
        draw.polygon([*ridge, (width, height), (0, height)], fill=color)
    return picture.filter(ImageFilter.GaussianBlur(1))


def make_video(prompt: Mapping[str, Any], *, mesh: str, use_gpu: bool) -> dict[str, Any]:
    """Start ComfyUI, run the workflow, stop ComfyUI; returns what the video and the log say."""
    server = ComfyServer(
        comfyui=find_comfyui(ROOT), base=BASE, packs={PACK_FOLDER: ROOT}, use_gpu=use_gpu
    )
    say("starting ComfyUI ...")
    with server:
        say(f"ComfyUI answers after {server.startup_s:.1f} s; queueing {WORKFLOW.name}")
        result = server.run(prompt, on_event=ProgressPrinter(prompt), timeout_s=RUN_TIMEOUT_S)
        if result.status != "success":
            raise DemoError(f"the workflow ended with {result.status}\n{result.error}")
        VIDEO.write_bytes(server.view(saved_video(result.outputs)))
        say(f"the workflow took {result.wall_s:.1f} s; stopping ComfyUI ...")
    frames, width, height = measure(VIDEO)
    return {
        "video": str(VIDEO.relative_to(ROOT)),
        "frames": frames,
        "width": width,
        "height": height,
        "mesh": mesh,
        "ranks": ready_ranks(BASE / "user" / "wan_dist_logs" / f"{mesh}.log"),
    }


class ProgressPrinter:
    """Prints which node runs and how far it is."""

    def __init__(self, prompt: Mapping[str, Any]) -> None:
        self._titles = {id: node["_meta"]["title"] for id, node in prompt.items()}
        self._is_loading = False

    def __call__(self, event: Event) -> None:
        title = self._titles.get(str(event.data.get("node")), "")
        if event.kind == "executing" and title:
            say(title)
        elif event.kind == "progress" and title:
            value, total = event.data["value"], event.data["max"]
            # A model that loads is counted in per cent.
            was_loading, self._is_loading = self._is_loading, total == 100
            if not self._is_loading:
                say(f"  {title}: {value} of {total}")
            elif not was_loading:
                say(f"  {title}: loading its weights")


def saved_video(outputs: Mapping[str, Any]) -> dict[str, str]:
    """The file that SaveVideo wrote, as ComfyUI names it."""
    for output in outputs.values():
        for files in output.values():
            for file in files:
                if isinstance(file, dict) and str(file.get("filename", "")).endswith(".mp4"):
                    return file
    raise DemoError(f"the workflow saved no video; its outputs: {json.dumps(outputs)[:500]}")


def measure(video: Path) -> tuple[int, int, int]:
    """Frames, width and height of a video file, by decoding it."""
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        frames = sum(1 for _ in container.decode(stream))
        return frames, stream.width, stream.height


def ready_ranks(log: Path) -> int:
    """How many ranks reported for work."""
    ranks = set(re.findall(r"\[rank (\d+)\].*\bready on\b", log.read_text(errors="replace")))
    if not ranks:
        raise DemoError(f"no rank of the worker group reported in {log}")
    return len(ranks)


def inputs_of(prompt: Mapping[str, Any], class_type: str) -> dict[str, Any]:
    """Inputs of the one node of this type."""
    (inputs,) = [node["inputs"] for node in prompt.values() if node["class_type"] == class_type]
    found: dict[str, Any] = inputs
    return found


def say(line: str) -> None:
    print(f"demo: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
