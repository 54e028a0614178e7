"""Host memory within the limits of control groups, as both versions of them lay out their files."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import psutil
import pytest

from comfy_wan_dist.mesh.host_memory import HostMemory, host_memory

MACHINE = 64 * 1024
MOUNT = "30 23 0:28 {root} {point} rw,nosuid shared:9 - {kind} {kind} rw,{options}\n"
V2_STAT = "anon 100\nfile 800\ninactive_file 500\nactive_file 250\n"
V1_STAT = (
    "cache 0\nactive_file 1\ninactive_file 2\ntotal_inactive_file 500\ntotal_active_file 250\n"
)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in /proc of a process in no control group, on a machine with 64 KiB free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: mock.Mock(available=MACHINE))
    (tmp_path / "self").mkdir()
    return tmp_path / "self"


def mount(process: Path, kind: str, *, own: str, root: str = "/") -> Path:
    """Mount the hierarchy `kind` from its group `root` downward, with this process in group `own`."""
    point = process.parent / kind
    point.mkdir()
    options = "memory" if kind == "cgroup" else "nsdelegate"
    with (process / "mountinfo").open("a") as file:
        file.write(MOUNT.format(root=root, point=point, kind=kind, options=options))
    with (process / "cgroup").open("a") as file:
        file.write(f"0::{own}\n" if kind == "cgroup2" else f"4:cpu:/x\n5:memory,pids:{own}\n")
    return point


def limit(folder: Path, value: str, *, used: int = 900) -> Path:
    """Write a group's files in both versions' way; which one counts is for its hierarchy."""
    folder.mkdir(parents=True, exist_ok=True)
    if "cgroup2" in folder.parts:
        texts = {"memory.max": value, "memory.current": used, "memory.stat": V2_STAT}
    else:
        texts = {
            "memory.limit_in_bytes": value,
            "memory.usage_in_bytes": used,
            "memory.stat": V1_STAT,
        }
    for name, text in texts.items():
        (folder / name).write_text(f"{text}\n")
    return folder


NONE = {"cgroup2": "max", "cgroup": "9223372036854771712"}


@pytest.mark.parametrize("kind", NONE)
def test_a_limit_counts_wherever_it_is_set(process: Path, kind: str) -> None:
    point = mount(process, kind, own="/user.slice/app.scope")
    own, above = point / "user.slice/app.scope", point / "user.slice"
    limit(own, NONE[kind])
    limit(above, NONE[kind])
    assert host_memory(process) == HostMemory(free=MACHINE, group=None)
    limit(own, "3000")
    # Files that the kernel keeps in memory, 750 bytes here, do not count: it gives them up.
    assert host_memory(process) == HostMemory(free=3000 - 900 + 750, group=own)
    limit(above, "2000")
    assert host_memory(process) == HostMemory(free=2000 - 900 + 750, group=above)
    limit(point, "100")  # lowered since
    assert host_memory(process) == HostMemory(free=0, group=point)


@pytest.mark.parametrize("kind", NONE)
@pytest.mark.parametrize(
    ("root", "own"),
    [
        ("/", "/"),  # a container with a name space of its own
        ("/docker/4f", "/docker/4f"),  # one with the host's, which sees its own part only
        ("/docker/4f", "/elsewhere"),
        ("/", "/../../other"),
    ],
)
def test_a_container_finds_its_own_limit(process: Path, kind: str, root: str, own: str) -> None:
    point = limit(mount(process, kind, own=own, root=root), "2000")
    assert host_memory(process) == HostMemory(free=1850, group=point)


@pytest.mark.parametrize("kind", NONE)
def test_mount_of_another_group_is_none_of_ours(process: Path, kind: str) -> None:
    """As a monitoring container binds it beside its own."""
    own = limit(mount(process, kind, own="/docker/4f", root="/docker/4f"), "3000")
    other = limit(process.parent / "other" / kind, "2000")
    line = MOUNT.format(root="/docker/9a", point=other, kind=kind, options="memory")
    file = process / "mountinfo"
    for text in (line + file.read_text(), file.read_text() + line):
        file.write_text(text)
        assert host_memory(process) == HostMemory(free=2850, group=own)


@pytest.mark.parametrize("kind", NONE)
def test_names_with_blanks_are_read(process: Path, kind: str) -> None:
    point = process.parent / "my groups" / kind
    limit(point / "a b", "2000")
    line = MOUNT.format(
        root="/x\\040y", point=str(point).replace(" ", r"\040"), kind=kind, options="memory"
    )
    (process / "mountinfo").write_text(line)
    (process / "cgroup").write_text(f"{'0:' if kind == 'cgroup2' else '5:memory'}:/x y/a b\n")
    assert host_memory(process) == HostMemory(free=1850, group=point / "a b")


def test_both_versions_may_be_mounted(process: Path) -> None:
    """As systemd's hybrid set-up does, where the limits are version 1's."""
    mount(process, "cgroup2", own="/a")
    own = limit(mount(process, "cgroup", own="/b") / "b", "2000")
    assert host_memory(process) == HostMemory(free=1850, group=own)


def test_what_cannot_be_read_limits_nothing(process: Path) -> None:
    assert host_memory(process) == HostMemory(free=MACHINE, group=None)
    point = limit(mount(process, "cgroup2", own="/"), "2000")
    (point / "memory.stat").unlink()  # gVisor has none
    assert host_memory(process) == HostMemory(free=1100, group=point)
    (point / "memory.current").unlink()
    assert host_memory(process) == HostMemory(free=MACHINE, group=None)


@pytest.mark.parametrize("kind", NONE)
@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("mountinfo", b"29 1 8:1 / /mnt/\xfcb rw - ext4 /dev/sda1 rw\n"),
        ("mountinfo", b"29 1 8:1 /\n"),
        ("mountinfo", b"29 - cgroup2 cgroup memory\n"),
        ("mountinfo", b"\n"),
        ("cgroup", b"9:name=\xfcb:/\xfcb\n"),
        ("cgroup", b"none\n"),
    ],
)
def test_lines_that_say_nothing_are_passed_over(
    process: Path, kind: str, file: str, line: bytes
) -> None:
    """Such as a mount whose name is in no encoding of today."""
    point = limit(mount(process, kind, own="/"), "2000")
    (process / file).write_bytes(line + (process / file).read_bytes())
    assert host_memory(process) == HostMemory(free=1850, group=point)


def test_memory_of_this_machine_is_plausible() -> None:
    assert 2**20 < host_memory().free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
