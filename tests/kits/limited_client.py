"""A group of two ranks below a memory limit: a job with a model that exceeds it, then one with a small model.

    python tests/kits/limited_client.py LOG LARGE SMALL

LARGE and SMALL are files of models. Prints an Outcome as JSON. In the ranks, whose runner `build` is, and where
MADE_UP_PROCESS is set, the control groups of the folder that it names count, which is like /proc/self.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comfy_kit import bytes_read

from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.registry import GroupRegistry
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import DeviceList
from comfy_wan_dist.mesh.host_memory import host_memory
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.wan import read_wan_file
from devtools.leasing import leased, lone_parcel, run_blocking
from devtools.mesh_runs import Case, Schedule, build_request, model_spec
from workers.resident import memory
from workers.runner import PlaneRunner

MADE_UP_PROCESS = "MADE_UP_PROCESS"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """error, message: of the job with the large model. read: bytes, by the ranks in that job.

    survived: whether the group had the same processes after both jobs.
    """

    error: str
    message: str
    read: int
    survived: bool


def build(**options: Any) -> PlaneRunner:
    """The runner of a rank."""
    if process := os.environ.get(MADE_UP_PROCESS):
        memory.host_memory = partial(host_memory, Path(process))  # type: ignore[attr-defined]
    return PlaneRunner(**options)


def main(log: Path, large: Path, small: Path) -> Outcome:
    registry = GroupRegistry()
    spec = LaunchSpec(
        degrees=MeshDegrees(ulysses=2),
        devices=DeviceList(kind="cpu", indices=(0, 1)),
        log_path=log,
        runner="limited_client:build",
    )
    try:
        with leased(registry, spec) as group:
            pids = group.pids
            before = sum(bytes_read(pids[1:]))
            try:
                sample(group, large)
                error, message = "", ""
            except ConfigError as refusal:
                error, message = type(refusal).__name__, str(refusal)
            read = sum(bytes_read(pids[1:])) - before
            sample(group, small)
            survived = group.is_alive and group.pids == pids
            return Outcome(error=error, message=message, read=read, survived=survived)
    finally:
        registry.stop_all()


def sample(group: WorkerGroup, path: Path) -> None:
    """One step with a model in bfloat16."""
    spec = model_spec(path, dtype="bfloat16")
    shape = read_wan_file(read_model_file(str(path))).shape
    inputs = Case(name="any", frames=2, height=4, width=4).inputs(shape)
    schedule = Schedule(solver="euler", sigmas=(1.0, 0.0), guidance=1.0)
    request, tensors = build_request(spec, inputs, schedule, mesh=str(group.spec.degrees))
    with lone_parcel() as parcel:
        for tensor in tensors[:-1]:
            parcel.pack([tensor])  # the n-th tensor in the n-th buffer, as the request says
        parcel.reserve(tensors[-1].shape, torch.float32)
        run_blocking(group, request, parcel)


if __name__ == "__main__":
    print(json.dumps(asdict(main(*map(Path, sys.argv[1:])))))
