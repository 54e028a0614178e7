"""Examine this machine: what a worker group needs, what is there, and one sentence for whatever is wrong.

`examine` looks, `diagnose` judges, so that the judgement can be tried on machines that are not here. Nothing is
started or changed. Not covered: whether a model file is whole (the loader says so), and other machines.
"""

from __future__ import annotations

import enum
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations

from ..mesh.choice import LARGE_VIDEO, choose_mesh, explain_mesh, peak_bytes
from ..mesh.devices import GB
from ..mesh.host_memory import HostMemory, host_memory
from ..mesh.shape import TI2V_5B
from ..mesh.workload import Workload
from .hardware import find_device
from .permissions import Permissions, examine_permissions

MIN_PYTHON = (3, 10)
PROBE_TIMEOUT_S = 20


class Level(enum.Enum):
    OK = "ok"
    NOTE = "note"
    """It works, but not as well as it could."""
    WRONG = "wrong"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    level: Level
    text: str

    @property
    def is_wrong(self) -> bool:
        return self.level is Level.WRONG


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """One CUDA device as PyTorch sees it. peers: indices of devices whose memory it reads directly."""

    name: str
    free: int
    total: int
    has_bfloat16: bool
    peers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What was found. None stands for what is not there or could not be read.

    driver_gpus: GPUs that the driver lists, whatever PyTorch sees. nvlinks: pairs of GPUs joined by NVLink.
    """

    system: str
    python: tuple[int, int]
    torch: str | None
    torch_error: str
    torch_cuda: str | None
    nccl: str | None
    has_memfd: bool
    permissions: Permissions
    memory: HostMemory
    driver_gpus: int
    gpus: tuple[GPU, ...]
    nvlinks: frozenset[tuple[int, int]] | None


# ---- look ------------------------------------------------------------------------------------------------------


def examine() -> Machine:
    """This machine. Loads torch if it is there."""
    torch_version, torch_error, torch_cuda, nccl = None, "", None, None
    gpus: tuple[GPU, ...] = ()
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that torch needs is missing
        torch_error = str(error)
    else:
        torch_version, torch_cuda = torch.__version__, torch.version.cuda
        if torch.cuda.is_available():
            gpus = tuple(map(_gpu, range(torch.cuda.device_count())))
            nccl = _nccl()
    return Machine(
        system=platform.system(),
        python=sys.version_info[:2],
        torch=torch_version,
        torch_error=torch_error,
        torch_cuda=torch_cuda,
        nccl=nccl,
        has_memfd=_has_memfd(),
        permissions=examine_permissions(),
        memory=host_memory(),
        driver_gpus=len(re.findall("^GPU ", _output("nvidia-smi", "-L"), flags=re.MULTILINE)),
        gpus=gpus,
        nvlinks=parse_topology(_output("nvidia-smi", "topo", "-m")),
    )


def _gpu(index: int) -> GPU:
    from torch import cuda

    free, total = cuda.mem_get_info(index)
    others = [other for other in range(cuda.device_count()) if other != index]
    return GPU(
        name=cuda.get_device_name(index),
        free=free,
        total=total,
        has_bfloat16=cuda.get_device_capability(index) >= (8, 0),
        peers=tuple(other for other in others if cuda.can_device_access_peer(index, other)),
    )


def _nccl() -> str | None:
    import torch

    try:
        version = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):  # a build without NCCL
        return None
    return ".".join(str(part) for part in version) if isinstance(version, tuple) else str(version)


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError):
        return False
    return True


def _output(*command: str) -> str:
    """What a command prints, or nothing if it is not there, fails, or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_topology(matrix: str) -> frozenset[tuple[int, int]] | None:
    """Pairs joined by NVLink in the output of `nvidia-smi topo -m`; None if there is no matrix in it."""
    # Some versions underline the head with terminal codes.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU[0-9]+\s", line)]
    rows = [row for row in rows if len(row) > 1 and not row[1].startswith("GPU")]
    if not rows:
        return None
    return frozenset(
        (int(row[0][3:]), other)
        for row in rows
        for other, link in enumerate(row[1 : len(rows) + 1])
        if re.fullmatch(r"NV[0-9]+", link)
    )


# ---- judge -----------------------------------------------------------------------------------------------------


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """One finding for each thing that a group needs."""
    checks = [_check_system(machine), _check_torch(machine)]
    if machine.torch is not None:
        checks += [_check_gpus(machine), _check_links(machine)]
    checks.append(_check_memory(machine))
    if machine.torch is not None:
        checks.append(_check_choice(machine))
    return tuple(chain(*checks))


def findings_text(findings: tuple[Finding, ...]) -> str:
    """A line for each finding, and what it comes to."""
    wrong = sum(finding.is_wrong for finding in findings)
    count = {0: "Nothing is", 1: "1 thing is"}.get(wrong, f"{wrong} things are")
    lines = [f"{finding.level.value:<6}{finding.text}" for finding in findings]
    return "\n".join([*lines, f"{count} wrong."])


def _ok(text: str) -> Finding:
    return Finding(level=Level.OK, text=text)


def _note(text: str) -> Finding:
    return Finding(level=Level.NOTE, text=text)


def _wrong(text: str) -> Finding:
    return Finding(level=Level.WRONG, text=text)


def _check_system(machine: Machine) -> Iterator[Finding]:
    python = ".".join(map(str, machine.python))
    if machine.system != "Linux":
        yield _wrong(f"This is {machine.system}; worker groups run on Linux only.")
    if machine.python < MIN_PYTHON:
        yield _wrong(f"Python is {python}; use 3.10 or newer.")
    else:
        yield _ok(f"Python {python} on {machine.system}.")
    if machine.has_memfd:
        yield _ok("memfd works: tensors can be handed over in shared memory.")
    else:
        yield _wrong(
            "memfd_create does not work, so tensors cannot be handed to the ranks; use Linux 3.17 or newer, or a "
            "sandbox that allows the call."
        )
    if machine.permissions.folder_error:
        yield _wrong(f"Worker groups cannot start: {machine.permissions.folder_error}.")
    yield from map(_note, machine.permissions.lacking())


def _check_torch(machine: Machine) -> Iterator[Finding]:
    built = f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "built without CUDA"
    if machine.torch is not None:
        yield _ok(f"torch {machine.torch}, {built}.")
    else:
        yield _wrong(
            f"torch cannot be imported ({machine.torch_error}); use the Python that ComfyUI runs with."
        )


def _check_gpus(machine: Machine) -> Iterator[Finding]:
    gpus, listed = machine.gpus, machine.driver_gpus
    if not gpus and not listed:
        yield _note("There is no NVIDIA GPU: jobs run on the CPU, which is fit for tests only.")
    elif not gpus:
        remedy = "install a torch that is built for CUDA"
        if machine.torch_cuda is not None:
            remedy = "check CUDA_VISIBLE_DEVICES and that the driver is new enough for torch's CUDA"
        yield _wrong(f"The driver lists {listed} GPUs but torch sees none; {remedy}.")
    for index, gpu in enumerate(gpus):
        yield _ok(f"GPU {index}: {gpu.name}, {gpu.free / GB:.1f} of {gpu.total / GB:.1f} GB free.")
    if 0 < len(gpus) < listed:
        yield _note(
            f"torch sees {len(gpus)} of {listed} GPUs; CUDA_VISIBLE_DEVICES hides the others."
        )
    if len({gpu.name for gpu in gpus}) > 1:
        yield _note(
            "The GPUs differ: all go at the pace of the slowest; name equal ones in `devices`."
        )
    if old := [str(index) for index, gpu in enumerate(gpus) if not gpu.has_bfloat16]:
        yield _wrong(
            f"GPU {', '.join(old)} has no bfloat16 arithmetic; leave it out or choose the dtype float16."
        )
    if gpus and machine.nccl is not None:
        yield _ok(f"NCCL {machine.nccl}.")
    elif len(gpus) > 1:
        yield _wrong(
            "torch has no NCCL, without which GPUs cannot work together; install an official Linux build."
        )


def _check_links(machine: Machine) -> Iterator[Finding]:
    pairs = list(combinations(range(len(machine.gpus)), 2))
    if not pairs:
        return
    if apart := [(one, other) for one, other in pairs if other not in machine.gpus[one].peers]:
        yield _note(
            f"No peer-to-peer access between GPUs {_named(apart[:8])}{', ...' if len(apart) > 8 else ''}: what they "
            "exchange goes through host memory, which is slower."
        )
    else:
        yield _ok("Peer-to-peer access works between all GPUs.")
    joined = [pair for pair in pairs if pair in (machine.nvlinks or ())]
    if machine.nvlinks is None:
        yield _note("nvidia-smi shows no topology: whether there is NVLink is not known.")
    elif len(joined) == len(pairs):
        yield _ok("NVLink joins all GPUs.")
    elif joined:
        yield _note(
            f"NVLink joins only some GPUs: {_named(joined[:8])}; put these side by side in `devices`."
        )
    else:
        yield _note("There is no NVLink: the GPUs exchange over PCIe, where tp costs most.")


def _named(pairs: list[tuple[int, int]]) -> str:
    return ", ".join(f"{one}-{other}" for one, other in pairs)


def _check_memory(machine: Machine) -> Iterator[Finding]:
    free = f"{machine.memory.free / GB:.1f} GB of host memory are free"
    if machine.memory.group is None:
        yield _ok(f"{free}.")
    else:
        yield _note(f"{free} within the limit of the control group {machine.memory.group}.")


def _check_choice(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield _ok("auto would choose: single, on the CPU.")
        return
    free = min(gpu.free for gpu in machine.gpus)
    job = Workload(shape=TI2V_5B, grid=LARGE_VIDEO, steps=1, guided=True)
    mesh = choose_mesh(TI2V_5B, device_count=len(machine.gpus), guided=True, device_memory=free)
    why = explain_mesh(mesh, job, device_memory=free)
    yield _ok(f"auto would choose {mesh} for TI2V-5B at 704x1280 and 121 frames. {why}")
    need = peak_bytes(job, mesh)
    if need > free:
        yield _wrong(
            f"Even then each GPU needs {need / GB:.1f} GB and one has {free / GB:.1f} GB free; close what uses the "
            "GPUs, make smaller videos, or use more or larger GPUs."
        )
    if unknown := {gpu.name for gpu in machine.gpus if find_device(gpu.name) is None}:
        yield _note(
            f"The planner has no figures for {', '.join(sorted(unknown))}; plan with the nearest it knows."
        )
