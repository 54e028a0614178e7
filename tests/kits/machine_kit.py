"""Other machines for tests: `worker --join` processes, here or in a network namespace of their own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from group_kit import processes_naming, search_path, wait_until

from comfy_wan_dist.ipc.tcp import Address
from comfy_wan_dist.mesh.machines import Machines
from devtools.interruptible import interruptible

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNET = 0x40000000

LOOPBACK = "127.0.0.2"
"""Where the other machine is played on this one."""
TWO = Machines(count=2, head=Address(host=LOOPBACK, port=29400))
LOST_LIMIT_S = 30.0
needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6")


def free_address(host: str = "127.0.0.1") -> Address:
    """One that nobody listens on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        return Address(host=host, port=taken.getsockname()[1])


class OtherMachine:
    """A `worker --join` process and the folder in which its groups make theirs. Use as a context manager."""

    def __init__(self, head: Address, *options: str, prefix: Sequence[str] = ()) -> None:
        # Short, because a socket may go there.
        self.private = Path(tempfile.mkdtemp(prefix="wdm-", dir="/tmp"))
        self.log = self.private.with_suffix(".log")
        worker = ["-m", "comfy_wan_dist", "worker", "--join", str(head), "--devices", "cpu:2"]
        command = [sys.executable, *worker]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, *interruptible([*command, *options])],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self.private), "PYTHONPATH": search_path()},
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> OtherMachine:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        wait_until(self.is_clean, 5)
        shutil.rmtree(self.private, ignore_errors=True)
        self.log.unlink(missing_ok=True)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[int]:
        """Of the group that it takes part in."""
        return processes_naming(f"{self.private}/")

    def ranks(self) -> list[int]:
        return [pid for pid in self.processes() if b"workers.process.main" in command_of(pid)]

    def is_clean(self) -> bool:
        """Whether no group's processes and folders are left."""
        return not self.processes() and not list(self.private.iterdir())

    def waits(self) -> bool:
        """Whether it lives, clean, and waits for a group."""
        last = self.said.strip().splitlines()[-1:]
        return (
            self.process.poll() is None
            and self.is_clean()
            and any("waiting for a group" in line for line in last)
        )

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(10)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Two network namespaces joined by a cable."""

    head: str
    other: str
    address: str

    def cut(self) -> None:
        """Pull the cable at the head's end: neither side is told."""
        ip("-n", self.head, "link", "set", "cable", "down")


def why_no_namespaces() -> str | None:
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"wdm-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    ip("netns", "del", name)
    return None


@contextlib.contextmanager
def two_namespaces() -> Iterator[Network]:
    net = Network(
        head=f"wdm-head-{os.getpid()}", other=f"wdm-other-{os.getpid()}", address="10.99.7.1"
    )
    with contextlib.ExitStack() as made:
        for name in (net.head, net.other):
            ip("netns", "add", name)
            made.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", net.head, "link", "add", "cable", "type", "veth", "peer", "name", "far")
        ip("-n", net.head, "link", "set", "far", "netns", net.other)
        for name, device, address in (
            (net.head, "cable", f"{net.address}/24"),
            (net.other, "far", "10.99.7.2/24"),
        ):
            ip("-n", name, "addr", "add", address, "dev", device)
            ip("-n", name, "link", "set", device, "up")
        yield net


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and what it starts, in a network namespace."""
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{namespace}") as away:
        _enter(away.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
