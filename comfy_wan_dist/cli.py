"""The command line: plan a mesh for devices that need not be here, examine this machine, lend it to another's group.

Answers go to standard output. Exit codes: 0, 1 if `doctor` found something wrong, 2 for what cannot be done as asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from math import isclose
from pathlib import Path

from .ipc.errors import ConfigError, WanDistError
from .ipc.tcp import parse_address
from .mesh.degrees import parse_mesh
from .mesh.devices import parse_devices
from .mesh.dtypes import COMPUTED
from .mesh.host_memory import host_memory
from .mesh.report import transfers_text
from .mesh.shape import KNOWN_MODELS, WanShape, video_grid
from .mesh.validate import validate_grid, validate_model
from .mesh.workload import Workload
from .model_file.header import read_model_file
from .model_file.wan import read_wan_file
from .planning.doctor import diagnose, examine, findings_text
from .planning.hardware import DEVICES, DevicePool, MeasureCPU, cpu_device, parse_pool
from .planning.plan import make_plan
from .planning.report import plan_text, plan_values


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except WanDistError as error:
        print(error, file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m comfy_wan_dist", description="Wan Dist outside of ComfyUI."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan", help="what each mesh costs on given devices, and which one to take"
    )
    plan.set_defaults(command=run_plan)
    plan.add_argument(
        "--model",
        default="ti2v-5b",
        help=f"{', '.join(KNOWN_MODELS)}, or a safetensors or GGUF file or model folder",
    )
    plan.add_argument(
        "--size", default="704x1280", help="height x width in pixels (default: %(default)s)"
    )
    plan.add_argument("--frames", type=int, default=121, help="default: %(default)s")
    plan.add_argument(
        "--devices",
        required=True,
        help=f"such as 8xH100-SXM or cpu:4; known: {', '.join(device.name for device in DEVICES)}",
    )
    plan.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    plan.add_argument(
        "--cfg", type=float, default=5.0, help="guidance scale; 1 is none (default: %(default)s)"
    )
    plan.add_argument(
        "--batch", type=int, default=1, help="videos in one job (default: %(default)s)"
    )
    plan.add_argument(
        "--dtype", choices=list(COMPUTED), default="bfloat16", help="default: %(default)s"
    )
    plan.add_argument("--mesh", help="list every collective of this mesh's first rank instead")
    plan.add_argument("--json", action="store_true", help="all meshes and all numbers as JSON")

    doctor = commands.add_parser("doctor", help="what this machine has, and what is wrong")
    doctor.set_defaults(command=run_doctor)
    doctor.add_argument("--json", action="store_true", help="the findings as JSON")

    worker = commands.add_parser(
        "worker", help="lend this machine's GPUs to the groups of a ComfyUI on another one"
    )
    worker.set_defaults(command=run_worker)
    worker.add_argument(
        "--join",
        required=True,
        metavar="HOST:PORT",
        help="head_address of the loader there; only join a machine that you trust",
    )
    worker.add_argument(
        "--devices",
        default="all",
        help="all, GPU indices such as 0,1, or cpu:N; the first ones are used (default: %(default)s)",
    )
    worker.add_argument(
        "--models",
        type=Path,
        metavar="FOLDER",
        help="where model files are found by their names if they do not lie at the same path as there",
    )
    return parser


def run_plan(options: argparse.Namespace) -> int:
    """Print a plan, or the collectives of one mesh."""
    height, width = parse_size(options.size)
    if not 0 <= options.cfg <= 100:
        raise ConfigError(f"cfg is {options.cfg}; it must be from 0 to 100")
    shape = model_shape(options.model)
    job = Workload(
        shape=shape,
        grid=video_grid(shape, height=height, width=width, frames=options.frames),
        steps=options.steps,
        guided=not isclose(options.cfg, 1.0),
        batch=options.batch,
        dtype=options.dtype,
    )
    if options.mesh is not None:
        mesh = parse_mesh(options.mesh)
        if mesh is None:
            raise ConfigError("--mesh lists one mesh's collectives and cannot be auto; name a mesh")
        if options.json:
            raise ConfigError(
                "--mesh prints a listing and no JSON; leave out one of --mesh and --json"
            )
        pool = device_pool(options.devices)
        if mesh.world_size > pool.count:
            raise ConfigError(
                f"mesh {mesh} needs {mesh.world_size} devices but {options.devices} has {pool.count}; name more"
            )
        validate_model(mesh, job.shape)
        validate_grid(mesh, job.grid, batch=job.batch)
        print(transfers_text(job, mesh, rank=0))
        return 0
    plan = make_plan(job, device_pool(options.devices))
    print(json.dumps(plan_values(plan), indent=2) if options.json else plan_text(plan))
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings; 1 if something is wrong."""
    findings = diagnose(examine())
    if options.json:
        print(
            json.dumps([{"level": one.level.value, "text": one.text} for one in findings], indent=2)
        )
    else:
        print(findings_text(findings))
    return int(any(one.is_wrong for one in findings))


def run_worker(options: argparse.Namespace) -> int:
    """Take part in groups until Ctrl-C."""
    with torch_needed():
        from .group.machines.join import Announcer, Offer, serve

    if options.models is not None and not options.models.is_dir():
        raise ConfigError(f"--models {options.models} is no folder; name one that is here")
    models = None if options.models is None else options.models.resolve()
    head = parse_address(options.join)
    visible = 0 if options.devices.strip().lower().startswith("cpu") else count_cuda()
    parse_devices(options.devices, visible_cuda=visible)
    offer = Offer(head=head, devices=options.devices, visible_cuda=visible, models=models)
    say = Announcer()
    try:
        serve(offer, say)
    except KeyboardInterrupt:
        say("ended")
    return 0


def count_cuda() -> int:
    """CUDA devices that this process sees."""
    with torch_needed():
        import torch

        return torch.cuda.device_count()


@contextlib.contextmanager
def torch_needed() -> Iterator[None]:
    """Raises ConfigError for a Python that has no torch, or one that cannot be loaded."""
    try:
        yield
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"torch cannot be imported ({error}); use the Python that ComfyUI runs with"
        ) from error


def parse_size(text: str) -> tuple[int, int]:
    """`704x1280` -> height and width."""
    match = re.fullmatch(r"([0-9]{1,5})\s*[xX*]\s*([0-9]{1,5})", text.strip())
    if match is None:
        raise ConfigError(f"size {text!r} is not height x width; write it like 704x1280")
    return int(match[1]), int(match[2])


def model_shape(model: str) -> WanShape:
    """The shape of a known model or of a file's. Raises ModelFileError, ConfigError."""
    if model.lower() in KNOWN_MODELS:
        return KNOWN_MODELS[model.lower()]
    if not Path(model).exists():
        raise ConfigError(
            f"model {model!r} is neither known nor a file; use {', '.join(KNOWN_MODELS)}, or the path of a "
            "safetensors or GGUF file or of a model's folder"
        )
    return read_wan_file(read_model_file(model)).shape


def device_pool(text: str, measure: MeasureCPU | None = None) -> DevicePool:
    """Devices by name, or `cpu:N`, which is measured here."""
    match = re.fullmatch(r"cpu(?::([0-9]{1,2}))?", text.strip().lower())
    if match is None:
        return parse_pool(text)
    ranks = int(match[1] or 1)
    if ranks < 1:
        raise ConfigError("devices cpu:0 are none; write cpu:1 or more")
    if measure is None:
        with torch_needed():
            from .planning.calibration import measure_cpu  # plans for GPUs need no torch

        measure = measure_cpu
    device = cpu_device(ranks=ranks, memory=host_memory().free, measure=measure)
    return DevicePool(devices=(device,) * ranks)
