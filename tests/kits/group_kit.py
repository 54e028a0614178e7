"""What the tests of worker groups share: specs, requests, and the search for leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.ipc.messages import DecodeRequest, TensorRef, VAESpec
from comfy_wan_dist.ipc.shared import Parcel
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import DeviceList
from comfy_wan_dist.mesh.machines import Machines
from devtools.interruptible import interruptible
from devtools.leasing import lone_parcel, run_blocking

KITS = Path(__file__).resolve().parent


def stub_spec(
    log_path: Path,
    *,
    ranks: int = 2,
    build: str = "build",
    start_timeout_s: float = 100.0,
    first_device: int = 0,
    machines: Machines | None = None,
) -> LaunchSpec:
    """A group of CPU ranks, `ranks` on each machine, whose runner is in stub_runner.py; KITS must be on PYTHONPATH."""
    return LaunchSpec(
        degrees=MeshDegrees(ulysses=ranks * (1 if machines is None else machines.count)),
        devices=DeviceList(kind="cpu", indices=tuple(range(first_device, first_device + ranks))),
        log_path=log_path,
        runner=f"stub_runner:{build}",
        start_timeout_s=start_timeout_s,
        machines=machines,
    )


def stub_request(parcel: Parcel, action: str, *, id: str = "job", size: int = 4) -> DecodeRequest:
    """Asks the stub runner for `action`; the latent is 0..size-1."""
    (latent,) = parcel.pack([torch.arange(float(size))])
    return DecodeRequest(
        id=id,
        vae=VAESpec(path=action, file_bytes=1, mtime_ns=1, dtype="float32"),
        latent=latent,
        result=parcel.reserve((size,), torch.float32),
    )


def empty_request(id: str) -> DecodeRequest:
    """A request for groups that are no processes; it names no tensor that is there."""
    nowhere = TensorRef(buffer=0, offset=0, dtype="float32", shape=(0,))
    spec = VAESpec(path="", file_bytes=1, mtime_ns=1, dtype="float32")
    return DecodeRequest(id=id, vae=spec, latent=nowhere, result=nowhere)


def ask(group: WorkerGroup, action: str) -> torch.Tensor:
    """The result of a job of the stub runner."""
    with lone_parcel() as parcel:
        request = stub_request(parcel, action)
        run_blocking(group, request, parcel)
        return parcel.tensor(request.result)


def search_path() -> str:
    """PYTHONPATH for ranks that import from this folder."""
    return os.pathsep.join(filter(None, [str(KITS), os.environ.get("PYTHONPATH", "")]))


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie, which a container's init may never reap."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return status.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def processes_naming(text: str) -> list[int]:
    """Living processes with `text` on their command line: a group's processes name their folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in line and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def listening_addresses(pids: list[int]) -> list[tuple[str, str]]:
    """(family, hex address) of every TCP socket that one of `pids` listens on."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    found = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append((family, fields[1].split(":")[0]))
    return found


class Interrupted(BaseException):
    """Like ComfyUI's interrupt, which newer versions do not derive from Exception."""


def assert_nothing_left(private: Path, pids: tuple[int, ...] = ()) -> None:
    assert [pid for pid in pids if is_running(pid)] == []
    assert processes_naming(str(private)) == []
    assert list(private.iterdir()) == []


def start_client(
    private: Path, log: Path, *moment: str, prefix: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """`moment`: as group_client.py takes it, head included. prefix: a command that runs its arguments."""
    command = [*prefix, sys.executable, str(KITS / "group_client.py"), str(log), *moment]
    client = subprocess.Popen(
        interruptible(command),
        env={
            **os.environ,
            "TMPDIR": str(private),
            "PYTHONPATH": f"{KITS.parents[1]}:{search_path()}",
        },
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    with client.stdout:
        assert client.stdout.readline() == b"there\n"
    return client
