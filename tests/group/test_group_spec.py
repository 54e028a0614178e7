"""What a group is launched with, and who may connect to it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_kit import stub_spec, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from comfy_wan_dist.group import folder, launch, listener
from comfy_wan_dist.group.environment import child_environment
from comfy_wan_dist.group.folder import PrivateFolder
from comfy_wan_dist.group.launch import GroupLog, StartingGroup
from comfy_wan_dist.group.listener import Listener
from comfy_wan_dist.group.process import ProcessHandle, parent_pid
from comfy_wan_dist.group.spec import PACK_ROOT, LaunchSpec, plane_specs
from comfy_wan_dist.ipc.channel import SocketChannel
from comfy_wan_dist.ipc.errors import WorkerStartError
from comfy_wan_dist.ipc.messages import Cancel, Hello
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import DeviceList
from comfy_wan_dist.mesh.layout import groups

CPU = DeviceList(kind="cpu", indices=(0, 1))


def cuda(*indices: int) -> DeviceList:
    return DeviceList(kind="cuda", indices=indices)


def spec_on(devices: DeviceList) -> LaunchSpec:
    return LaunchSpec(degrees=MeshDegrees(tp=2), devices=devices, log_path=Path("log"))


def test_environment_drops_what_is_comfyuis_own_and_keeps_the_users() -> None:
    child = child_environment(
        {
            "PATH": "/bin",
            "NCCL_DEBUG": "INFO",
            "OMP_NUM_THREADS": "3",
            "MKL_NUM_THREADS": "",  # as of a container's template; accelerate reads it as a number
            "PYTHONPATH": "/mine",
            "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "RANK": "3",
            "MASTER_PORT": "1",
            "TORCHELASTIC_RUN_ID": "x",
            "ACCELERATE_USE_CPU": "true",
        },
        devices=CPU,
        pack_root=Path("/pack"),
    )
    assert child == {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "3",
        "PYTHONPATH": "/pack:/mine",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def test_environment_names_a_user_whom_the_system_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with docker --user 4242; torch asks for the name when it compiles."""
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    child = child_environment(os.environ, devices=CPU, pack_root=Path("/pack"))
    assert child["USER"] == "3999999999"
    monkeypatch.setenv("USER", "me")
    child = child_environment(os.environ, devices=CPU, pack_root=Path("/pack"))
    assert child["USER"] == "me"


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_ranks_import_ours_whatever_else_is_called_so(tmp_path: Path, safe_path: str) -> None:
    """Other packs on PYTHONPATH have top-level packages of these names too."""
    for name in ("workers", "tests", "comfy_wan_dist"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('theirs')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": safe_path}
    child = child_environment(environment, devices=CPU, pack_root=PACK_ROOT)
    for module in ("workers.process.launcher", "workers.process.main"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            cwd=PACK_ROOT,
            env=child,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "--runner" in done.stdout


@pytest.mark.parametrize(
    ("seen", "devices", "expected"),
    [
        (None, cuda(0, 1), "0,1"),
        (None, cuda(3, 1), "3,1"),
        ("2,5,7", cuda(0, 2), "2,7"),
        ("GPU-aa, GPU-bb", cuda(1), "GPU-bb"),
        ("4", CPU, ""),
    ],
)
def test_environment_shows_each_rank_its_device_in_order(
    seen: str | None, devices: DeviceList, expected: str
) -> None:
    environment = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    child = child_environment(environment, devices=devices, pack_root=Path("/pack"))
    assert child["CUDA_VISIBLE_DEVICES"] == expected


def test_spec_tells_which_groups_are_the_same_and_which_collide() -> None:
    assert spec_on(cuda(0, 1)).key == spec_on(cuda(0, 1, 2)).key
    assert spec_on(cuda(0, 1)).key != spec_on(cuda(1, 0)).key
    assert spec_on(cuda(0, 1)).shares_devices_with(spec_on(cuda(1, 2)))
    assert not spec_on(cuda(0, 1)).shares_devices_with(spec_on(cuda(2, 3)))
    assert spec_on(CPU).shares_devices_with(stub_spec(Path("log"), ranks=1))
    assert not spec_on(CPU).shares_devices_with(spec_on(cuda(0, 1)))
    assert not spec_on(CPU).shares_devices_with(spec_on(DeviceList(kind="cpu", indices=(2, 3))))


def test_planes_have_devices_of_their_own_in_the_order_of_the_ranks() -> None:
    degrees = MeshDegrees(dp=2, cfg=2, ulysses=2)
    devices = cuda(7, 6, 5, 4, 3, 2, 1, 0)
    planes = plane_specs(degrees, devices, log_folder=Path("logs"))
    assert [plane.used_devices.indices for plane in planes] == [(7, 6, 5, 4), (3, 2, 1, 0)]
    assert {plane.degrees for plane in planes} == {MeshDegrees(cfg=2, ulysses=2)}
    # As the planner numbers ranks: a plane's are neighbours, plane 0 first.
    assert groups(degrees, ("cfg", "ulysses")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert not planes[0].shares_devices_with(planes[1])
    assert planes[0].log_path != planes[1].log_path
    (single,) = plane_specs(MeshDegrees(tp=2), devices, log_folder=Path("logs"))
    assert single.log_path == Path("logs/tp2.log")


def test_spec_refuses_more_than_a_plane_and_too_few_devices() -> None:
    with pytest.raises(ValueError, match="dp2"):
        replace(spec_on(CPU), degrees=MeshDegrees(dp=2))
    with pytest.raises(ValueError, match="needs 4 devices; 2"):
        replace(spec_on(CPU), degrees=MeshDegrees(tp=4))


def test_pack_root_is_found_whatever_its_name() -> None:
    assert (PACK_ROOT / "workers" / "process" / "launcher.py").is_file()


def test_start_elsewhere_than_linux_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(WorkerStartError, match="Linux only; this is win32"):
        StartingGroup(stub_spec(tmp_path / "log"))


def test_log_tail_is_of_this_start_and_the_file_does_not_grow_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "logs" / "group.log"
    for text in ("first\n", "second\n"):
        log = GroupLog(path)
        assert log.tail() == log.quoted() == ""
        os.write(log.descriptor, text.encode())
        assert log.tail() == text.strip()
        log.close()
    assert path.read_text() == "first\nsecond\n"
    monkeypatch.setattr(launch, "MAX_LOG_BYTES", 5)
    GroupLog(path).close()
    assert path.read_text() == ""


def no_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the refusal is made up."""
    (folder / "user.log").touch()
    real = os.open

    def refuse(path: Any, *arguments: Any, **named: Any) -> int:
        if path == folder / "user.log":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder, _: folder.rmdir() or folder.touch(), "File exists"),
        (lambda folder, _: (folder / "user.log").mkdir(), "Is a directory"),
        (no_permission, "Permission denied"),  # an earlier run's as root
    ],
)
def test_log_goes_elsewhere_where_the_user_folder_cannot_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    for name in ("logs", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    spoil(tmp_path / "logs", monkeypatch)
    log = GroupLog(tmp_path / "logs" / "user.log")
    os.write(log.descriptor, b"one\n")
    log.close()
    assert log.path.parent == tmp_path / "tmp"
    assert log.tail() == "one"
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    (warning,) = caplog.messages
    assert reason in warning
    assert str(log.path) in warning


@pytest.fixture(params=["pidfds", "refused", "signals refused"])
def pidfds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    if request.param == "refused":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    if request.param == "signals refused":
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)


@pytest.mark.usefixtures("pidfds")
def test_process_handle_tells_of_the_end_and_frees_what_it_holds() -> None:
    before = len(os.listdir("/proc/self/fd"))
    sleeper = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    handles = [ProcessHandle(sleeper), ProcessHandle(sleeper)]
    copies = os.fork()  # another pack's child, with copies of all descriptors
    if copies == 0:
        time.sleep(10)
        os._exit(0)
    assert not handles[0].wait(0)
    handles[1].close()  # before the end
    handles[0].send_signal(signal.SIGTERM)
    assert handles[0].wait(5)  # as soon as it can be reaped
    os.kill(copies, signal.SIGKILL)
    os.waitpid(copies, 0)
    assert os.waitpid(sleeper, 0)[1] == signal.SIGTERM
    handles[0].close()
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) == before, 5)
    with pytest.raises(OSError, match=r"\[Errno (2|3)\]"):
        ProcessHandle(sleeper)


@pytest.mark.usefixtures("pidfds")
def test_process_handle_never_signals_a_stranger() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    handle = ProcessHandle(child)
    assert parent_pid(child) in (os.getpid(), None)
    assert handle.wait(5)
    os.waitpid(child, 0)  # from here on its number may be another process
    handle.send_signal(9)  # type: ignore[arg-type]
    handle.close()
    assert parent_pid(child) != os.getpid()


# ---- who may connect ---------------------------------------------------------------------------


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 0.2)
    folder = PrivateFolder()
    door = Listener(folder, world_size=2)
    yield door
    door.close()
    folder.remove()
    assert not folder.path.exists()


def connect(door: Listener) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(door._folder.path / "socket"))
    return connection


def hello(
    door: Listener, *, token: str | None = None, rank: int = 1, pid: int | None = None
) -> Hello:
    true_token = (door._folder.path / "token").read_text()
    return Hello(
        token=true_token if token is None else token,
        rank=rank,
        pid=os.getpid() if pid is None else pid,
    )


def test_listener_admits_a_child_of_the_launcher_with_the_token(door: Listener) -> None:
    client = SocketChannel(connect(door))
    client.send(hello(door), timeout_s=1)
    admitted = door.accept(launcher_pid=os.getppid())
    assert admitted is not None
    assert admitted.process is not None
    assert (admitted.rank, admitted.process.pid) == (1, os.getpid())
    admitted.channel.close()
    admitted.process.close()
    client.close()
    assert stat.S_IMODE(door._folder.path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("changes", "is_ours"),
    [
        ({"token": "0" * 64}, True),
        ({"token": ""}, True),
        ({"rank": 2}, True),
        ({"rank": -1}, True),
        ({"pid": 1}, True),
        ({}, False),
    ],
)
def test_listener_refuses_strangers(door: Listener, changes: dict[str, Any], is_ours: bool) -> None:
    launcher_pid = os.getppid() if is_ours else os.getpid()
    before = len(os.listdir("/proc/self/fd"))
    client = SocketChannel(connect(door))
    client.send(hello(door, **changes), timeout_s=1)
    assert door.accept(launcher_pid=launcher_pid) is None
    client.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_listener_refuses_other_users(door: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SocketChannel(connect(door))
    client.send(hello(door), timeout_s=1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert door.accept(launcher_pid=os.getppid()) is None
    client.close()


def test_listener_does_not_wait_for_the_silent(door: Listener) -> None:
    assert door.accept(launcher_pid=os.getppid()) is None  # nobody there
    silent = connect(door)
    assert door.accept(launcher_pid=os.getppid()) is None
    silent.close()
    other = SocketChannel(connect(door))
    other.send(Cancel(id="x"), timeout_s=1)
    assert door.accept(launcher_pid=os.getppid()) is None
    other.close()


def test_listener_survives_any_bytes(door: Listener) -> None:
    gc.collect()  # or it closes what other tests left while this one counts
    before = len(os.listdir("/proc/self/fd"))

    @settings(max_examples=60, deadline=None)
    @given(data=st.binary(max_size=60), framed=st.booleans())
    def knock(data: bytes, framed: bool) -> None:
        raw = connect(door)
        raw.send((struct.pack("<I", len(data)) if framed else b"") + data)
        raw.shutdown(socket.SHUT_WR)
        assert door.accept(launcher_pid=os.getppid()) is None
        raw.close()

    knock()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with room for the name of a socket; pytest's own may have none."""
    with tempfile.TemporaryDirectory(prefix="wdt-") as made:
        yield Path(made)


def test_private_folder_goes_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    full, roomy = short_path / "full", short_path / "roomy"
    full.mkdir()
    roomy.mkdir()

    def allocate(descriptor: int, *_: object) -> None:
        if full in Path(os.readlink(f"/proc/self/fd/{descriptor}")).parents:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(folder, "OTHER_PLACES", ("/nowhere", str(roomy)))
    monkeypatch.setattr("tempfile.tempdir", str(full))
    private = PrivateFolder()
    assert private.path.parent == roomy
    assert (private.path / "token").read_text() == private.token
    private.remove()
    monkeypatch.setattr(folder, "OTHER_PLACES", ("/nowhere",))
    with pytest.raises(OSError, match=f"{full}: No space left.*/nowhere: No such file.*TMPDIR"):
        PrivateFolder()
    assert [*full.iterdir(), *roomy.iterdir()] == []


def test_listener_finds_a_shorter_place_for_its_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = PrivateFolder()
    door = Listener(folder, world_size=1)
    connect(door).close()
    door.close()
    folder.remove()
    assert list(deep.iterdir()) == []
