"""One group over several machines: the same result as one process, and an end for everything when a machine is lost.

Most tests play the other machine on this one, over 127.0.0.2. Those that cut the cable use two network namespaces,
which need root and iproute2.
Covered: joining, refusals, deaths on either side. Not covered: addresses and sockets (test_addresses.py), tensors and
files on other machines (test_copies.py), NCCL, and machines that differ in their software.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from group_kit import (
    Interrupted,
    ask,
    assert_nothing_left,
    is_running,
    listening_addresses,
    processes_naming,
    search_path,
    start_client,
    stub_spec,
    wait_until,
)
from machine_kit import (
    LOOPBACK,
    LOST_LIMIT_S,
    TWO,
    Network,
    OtherMachine,
    free_address,
    inside,
    needs_ipv6,
    two_namespaces,
    why_no_namespaces,
)

from comfy_wan_dist.cli import main
from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.environment import child_environment
from comfy_wan_dist.group.launch import StartingGroup
from comfy_wan_dist.group.machines import door as machines_module
from comfy_wan_dist.group.machines.door import MachineDoor
from comfy_wan_dist.group.machines.join import Offer, _take_part
from comfy_wan_dist.group.registry import GroupRegistry
from comfy_wan_dist.group.spec import LaunchSpec, plane_specs
from comfy_wan_dist.ipc import messages, tcp
from comfy_wan_dist.ipc.channel import ChannelClosed, SocketChannel
from comfy_wan_dist.ipc.errors import (
    ConfigError,
    MachineLost,
    MeshError,
    ModelFileError,
    VersionMismatch,
    WorkerDied,
    WorkerStartError,
)
from comfy_wan_dist.ipc.machine_messages import Arrive, Join, Refuse
from comfy_wan_dist.ipc.messages import (
    Hello,
    ModelSpec,
    Progress,
    tensor_refs,
    with_tensor_refs,
)
from comfy_wan_dist.ipc.tcp import Address
from comfy_wan_dist.jobs.handle import ModelHandle, resolve_model
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import DeviceList
from comfy_wan_dist.mesh.machines import Machines
from devtools.checkpoints import TINY_TRANSFORMER
from devtools.leasing import leased, lone_parcel, run_blocking
from devtools.mesh_runs import (
    CASES,
    GUIDANCE,
    RUN_LIMIT,
    SIGMAS,
    Inputs,
    Schedule,
    build_request,
    model_spec,
    relative_error,
    sample_rank,
)

# Groups start in several of them, and a lost machine takes half a minute to notice.
pytestmark = pytest.mark.timeout(240)

CPU_2 = DeviceList(kind="cpu", indices=(0, 1))


@pytest.fixture(autouse=True)
def runner_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path())


def two_machines(
    log: Path, head: Address, *, ranks: int = 1, start_timeout_s: float = 100.0
) -> LaunchSpec:
    """A group of stub ranks here and on one other machine."""
    machines = Machines(count=2, head=head)
    return stub_spec(log, ranks=ranks, machines=machines, start_timeout_s=start_timeout_s)


# ---- what is asked for


@pytest.mark.parametrize(
    ("mesh", "devices", "machines", "expected", "on_each"),
    [
        ("auto", "cpu:2", 2, "cfg2-ulysses2", 2),
        ("auto", "cpu:1", 3, "ring3", 1),
        ("cfg2", "cpu:4", 2, "cfg2", 1),
        ("auto", "cpu:2", 1, "cfg2", 2),
    ],
)
def test_devices_are_those_of_each_machine(
    model_path: Path, mesh: str, devices: str, machines: int, expected: str, on_each: int
) -> None:
    handle = ModelHandle(
        path=str(model_path),
        dtype="auto",
        mesh=mesh,
        devices=devices,
        compile=False,
        machines=machines,
        head_address=str(TWO.head),
    )
    resolved = resolve_model(handle, visible_cuda=0)
    assert (str(resolved.degrees), resolved.devices.count) == (expected, on_each)
    (spec,) = plane_specs(
        resolved.degrees, resolved.devices, log_folder=Path("logs"), machines=resolved.machines
    )
    assert (spec.world_size, spec.ranks_per_machine) == (machines * on_each, on_each)


@pytest.mark.parametrize(
    ("mesh", "machines", "message"),
    [
        ("dp2-cfg2", 2, "one plane"),
        ("single", 2, "the 1 ranks of mesh single do not divide by 2 machines"),
        ("cfg2-ulysses2", 3, "do not divide"),
        ("ulysses8", 2, r"needs 8 devices but 4 are given \(cpu:2 on each of 2 machines\)"),
    ],
)
def test_meshes_that_machines_cannot_share_are_refused(
    model_path: Path, mesh: str, machines: int, message: str
) -> None:
    handle = ModelHandle(
        path=str(model_path),
        dtype="auto",
        mesh=mesh,
        devices="cpu:2",
        compile=False,
        machines=machines,
        head_address=str(TWO.head),
    )
    with pytest.raises(MeshError, match=message):
        resolve_model(handle, visible_cuda=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--join", "nonsense"), "HOST:PORT"),
        (("--join", "a:1", "--devices", "cpu:0"), "asks for 0 CPU ranks"),
        (("--join", "a:1", "--models", "/nonexistent"), "is no folder"),
    ],
)
def test_worker_command_refuses_what_it_cannot_do(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", *options]) == 2
    assert message in capsys.readouterr().err


def test_groups_with_other_machines_are_told_apart() -> None:
    alone = stub_spec(Path("log"))
    two = stub_spec(Path("log"), machines=TWO)
    elsewhere = stub_spec(
        Path("log"), machines=replace(TWO, head=replace(TWO.head, port=1)), first_device=8
    )
    assert len({alone.key, two.key, elsewhere.key}) == 3
    assert two.used_devices == alone.used_devices
    assert two.shares_devices_with(alone)
    assert two.shares_devices_with(elsewhere)  # the other machines serve one at a time
    assert not alone.shares_devices_with(elsewhere)


def test_collectives_use_the_interface_towards_the_others_unless_the_user_knows_better() -> None:
    def interfaces(**environment: str) -> tuple[str, str]:
        child = child_environment(
            environment, devices=CPU_2, pack_root=Path("/pack"), interface="eth1"
        )
        return child["GLOO_SOCKET_IFNAME"], child["NCCL_SOCKET_IFNAME"]

    assert interfaces() == ("eth1", "=eth1")
    assert interfaces(NCCL_SOCKET_IFNAME="ib0") == ("eth1", "ib0")


# ---- sockets


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("203.0.113.7", "it is no address of this machine"),
        ("no-such-host.invalid", "cannot be found"),
        ("localhost", "means 127.0.0.1 on this machine, which no other machine reaches"),
        (LOOPBACK, "choose another port"),
    ],
)
def test_address_that_cannot_be_listened_on_fails_the_start_cleanly(
    private: Path, tmp_path: Path, host: str, message: str
) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server((LOOPBACK, 0)) as taken:
        head = Address(host=host, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=message) as caught:
            StartingGroup(two_machines(tmp_path / "log", head))
        assert "\n" not in str(caught.value)
    assert_nothing_left(private)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def door() -> Iterator[MachineDoor]:
    spec = stub_spec(Path("log"), machines=Machines(count=2, head=free_address(LOOPBACK)))
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    door = MachineDoor(spec, token="secret")
    yield door
    door.close()
    for machine in door.joined.values():
        machine.channel.close()
    assert len(os.listdir("/proc/self/fd")) == before


@contextlib.contextmanager
def knocking(door: MachineDoor) -> Iterator[SocketChannel]:
    assert door._spec.machines is not None
    channel = SocketChannel(tcp.connect(door._spec.machines.head, timeout_s=2))
    yield channel
    channel.close()


def test_door_lets_a_machine_and_its_ranks_in(door: MachineDoor) -> None:
    assert door.accept() is None  # nobody there
    with knocking(door) as machine, knocking(door) as extra, knocking(door) as rank:
        machine.send(Arrive(name="other"), timeout_s=1)
        assert door.accept() is None
        assert machine.receive(1).message == Join(
            machine=1,
            machines=2,
            ranks=2,
            device="cpu",
            mesh="ulysses4",
            runner="stub_runner:build",
            store_port=door.store_address.port,
            token="secret",
        )
        assert door.missing == 0
        extra.send(Arrive(name="third"), timeout_s=1)
        assert door.accept() is None
        refusal = extra.receive(1).message
        assert isinstance(refusal, Refuse)
        assert "2 machines already" in refusal.reason
        rank.send(Hello(token="secret", rank=3, pid=77), timeout_s=1)
        admitted = door.accept()
        assert admitted is not None
        assert (admitted.rank, admitted.machine, admitted.process) == (3, 1, None)
        assert admitted.place == " on machine other (127.0.0.1)"
        admitted.close()


@pytest.mark.parametrize(
    ("token", "rank", "is_joined"),
    [
        ("wrong", 2, True),
        ("geheim-ü", 2, True),
        ("secret", 1, True),
        ("secret", 4, True),
        ("secret", -1, True),
        ("secret", 2, False),
    ],
)
def test_door_refuses_strange_ranks(
    door: MachineDoor, token: str, rank: int, is_joined: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with knocking(door) as machine, knocking(door) as stranger:
        if is_joined:
            machine.send(Arrive(name="other"), timeout_s=1)
            assert door.accept() is None
        else:
            machine.close()
            assert door.accept() is None
        stranger.send(Hello(token=token, rank=rank, pid=77), timeout_s=1)
        assert door.accept() is None
        with pytest.raises(ChannelClosed):
            stranger.receive(1)
    assert "refused a connection from 127.0.0.1" in caplog.text


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 2) + b"{}", b"\xff" * 64]
)
def test_door_survives_any_bytes(door: MachineDoor, data: bytes) -> None:
    assert door._spec.machines is not None
    with tcp.connect(door._spec.machines.head, timeout_s=2) as raw:
        raw.sendall(data)
        assert door.accept() is None


def test_machine_that_has_gone_again_does_not_join(door: MachineDoor) -> None:
    with knocking(door) as machine:
        machine.send(Arrive(name="other"), timeout_s=1)
    assert door.accept() is None
    assert door.missing == 1


def test_silent_connections_hold_nobody_up(
    door: MachineDoor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machines_module, "MAX_GUESTS", 8)
    assert door._spec.machines is not None
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            silent = stack.enter_context(tcp.connect(door._spec.machines.head, timeout_s=2))
            silent.sendall(b"\0\1")  # half a length
        machine = stack.enter_context(knocking(door))
        started = time.monotonic()
        for _ in range(13):
            assert door.accept() is None
        machine.send(Arrive(name="other"), timeout_s=1)
        assert door.accept() is None
        assert isinstance(machine.receive(1).message, Join)
        assert time.monotonic() - started < 1
        assert len(door._guests) == 8 - 1
    assert caplog.text.count("never said a word") == 13 - 8


def test_another_version_is_named_on_both_sides(
    door: MachineDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with knocking(door) as machine:
        with monkeypatch.context() as older:
            older.setattr(messages, "PROTOCOL_VERSION", 99)
            machine.send(Arrive(name="other"), timeout_s=1)
        with pytest.raises(
            WorkerStartError, match=r"127\.0\.0\.1 .*another version.*99.*install the same"
        ):
            door.accept()
        with monkeypatch.context() as older:
            older.setattr(messages, "PROTOCOL_VERSION", 99)
            with pytest.raises(VersionMismatch, match="this side speaks 99"):
                machine.receive(1)


@pytest.mark.parametrize("nonsense", [{"runner": "a\0b"}, {"token": "\ud800"}, {"device": "tpu"}])
def test_nonsense_of_a_head_is_refused_and_leaves_nothing(
    private: Path, nonsense: dict[str, str]
) -> None:
    join = Join(
        machine=1,
        machines=2,
        ranks=1,
        device="cpu",
        mesh="ulysses2",
        runner="stub_runner:build",
        store_port=1,
        token="secret",
    )
    offer = Offer(head=TWO.head, devices="cpu:1", visible_cuda=0, models=None)
    said: list[str] = []
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        head, machine = map(SocketChannel, socket.socketpair())
        for channel in (head, machine):
            stack.callback(channel.close)
        head.send(replace(join, **nonsense), timeout_s=1)  # type: ignore[arg-type]
        _take_part(offer, machine, ip="127.0.0.1", say=said.append)
        assert isinstance(head.receive(1).message, Arrive)
        refusal = head.receive(1).message
        assert isinstance(refusal, Refuse)
        assert [refusal.reason] == said
    assert list(private.iterdir()) == []
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) == before, 5)


# ---- groups of two machines, both played by this one


def test_group_over_two_machines_works_and_ends_with_either(
    registry: GroupRegistry, private: Path, tmp_path: Path
) -> None:
    """One test, because each group takes seconds to start."""
    head = free_address(LOOPBACK)
    spec = two_machines(tmp_path / "log", head)
    with OtherMachine(head) as other:
        with leased(registry, spec) as group:
            assert torch.equal(ask(group, "echo"), torch.arange(4.0) + 1)
            assert len(other.ranks()) == 1
            with pytest.raises(ModelFileError, match="bad shard on rank 1"):
                ask(group, "config:1")
            listeners = listening_addresses(processes_naming(f"{private}/"))
            assert {address for _, address in listeners} == {"0100007F", "0200007F"}  # gloo, store
            with socket.socket() as visitor, pytest.raises(OSError, match="refused"):
                visitor.connect((head.host, head.port))  # nobody listens once the group is ready
            # A rank over there is killed in a job that rank 0 waits in.
            (rank,) = other.ranks()
            timer = threading.Timer(0.3, os.kill, (rank, signal.SIGKILL))
            timer.start()
            started = time.monotonic()
            with pytest.raises(
                WorkerDied, match=r"rank 1 of the worker group on machine .* ended"
            ) as died:
                ask(group, "hang")
            assert time.monotonic() - started < 8
            timer.join()
            assert not isinstance(died.value, MachineLost)  # the machine can take part again
        assert wait_until(other.waits, 8), other.said
        assert_nothing_left(private)

        with leased(registry, spec) as group:
            assert torch.equal(ask(group, "echo"), torch.arange(4.0) + 1)
            # The process there that has joined is killed: its ranks go with it.
            timer = threading.Timer(0.3, other.process.kill)
            timer.start()
            started = time.monotonic()
            with pytest.raises(MachineLost, match=r"machine .* \(127\.0\.0\.1\) is lost"):
                ask(group, "hang")
            assert time.monotonic() - started < 8
            timer.join()
            assert wait_until(other.is_clean, 5), other.processes()


@pytest.mark.parametrize(
    ("moment", "host"), [("stuck", LOOPBACK), pytest.param("forked", "::1", marks=needs_ipv6)]
)
def test_other_machine_waits_again_when_the_head_is_killed(
    tmp_path: Path, moment: str, host: str
) -> None:
    head = free_address(host)
    with OtherMachine(head) as other, tempfile.TemporaryDirectory(prefix="wdt-") as folder:
        client = start_client(Path(folder), tmp_path / "log", moment, str(head))
        assert len(other.ranks()) == 1
        client.kill()
        client.wait()
        assert wait_until(other.waits, 8), other.said
        assert wait_until(lambda: not processes_naming(folder), 5)
        assert other.interrupt() == 0
        assert other.said.endswith("ended\n")
        assert "Traceback" not in other.said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--devices", "cpu:1"),
            r"gave up: the group needs 2 cpu devices on each machine; this one gives 1 cpu .*different numbers",
        ),
        (
            None,
            r"(?s)within 2 s; 0 of 1 other machines joined: run `python -m comfy_wan_dist worker --join 127\.0\.0\.2:",
        ),
    ],
)
def test_start_without_what_it_needs_is_one_sentence_and_leaves_nothing(
    registry: GroupRegistry,
    private: Path,
    tmp_path: Path,
    options: tuple[str, ...] | None,
    message: str,
) -> None:
    head = free_address(LOOPBACK)
    timeout_s = 2 if options is None else 60
    spec = two_machines(tmp_path / "log", head, ranks=2, start_timeout_s=timeout_s)
    with contextlib.ExitStack() as stack:
        other = None if options is None else stack.enter_context(OtherMachine(head, *options))
        with pytest.raises(WorkerStartError, match=message):
            leased(registry, spec).__enter__()
        assert_nothing_left(private)
        if other is not None:
            assert wait_until(other.waits, 5), other.said


def test_failure_over_there_is_told_here_with_its_last_lines(
    registry: GroupRegistry, tmp_path: Path
) -> None:
    head = free_address(LOOPBACK)
    spec = replace(two_machines(tmp_path / "log", head), runner="stub_runner:build_fails")
    with OtherMachine(head) as other:
        with pytest.raises(
            WorkerStartError, match=r"(?s)gave up: its processes ended.*this rank cannot start"
        ):
            leased(registry, spec).__enter__()
        assert wait_until(other.waits, 5), other.said


# ---- two machines with a cable between them


@pytest.fixture
def network() -> Iterator[Network]:
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    with two_namespaces() as net:
        yield net


def run_sample(
    group: WorkerGroup,
    spec: ModelSpec,
    inputs: Inputs,
    schedule: Schedule,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[torch.Tensor, list[int]]:
    """Result, and the bytes that each rank has read."""
    request, tensors = build_request(spec, inputs, schedule, mesh=str(group.spec.degrees))
    with lone_parcel() as parcel:
        refs = [*parcel.pack(tensors[:-1]), parcel.reserve(tensors[-1].shape, torch.float32)]
        named = {name: refs[ref.buffer] for name, ref in tensor_refs(request).items()}
        sent = with_tensor_refs(request, named)
        answers = run_blocking(group, sent, parcel, on_progress=on_progress)
        return parcel.tensor(named["result"]), [answer.bytes_read for answer in answers]


def test_two_ranks_on_each_of_two_machines_sample_as_one_process_until_the_cable_is_cut(
    network: Network, registry: GroupRegistry, private: Path, tmp_path: Path, model_path: Path
) -> None:
    spec = model_spec(model_path)
    inputs = CASES[1].inputs(TINY_TRANSFORMER)
    schedule = Schedule(solver="uni_pc", sigmas=SIGMAS, guidance=GUIDANCE)
    expected, _, _ = sample_rank(0, "single", spec, inputs, schedule)
    head = Address(host=network.address, port=29400)
    plane = LaunchSpec(
        degrees=MeshDegrees(cfg=2, ulysses=2),
        devices=CPU_2,
        log_path=tmp_path / "log",
        machines=Machines(count=2, head=head),
    )
    prefix = ("ip", "netns", "exec", network.other)
    with OtherMachine(head, prefix=prefix) as other, inside(network.head):
        with leased(registry, plane) as group:
            assert len(other.ranks()) == 2
            for is_first in (True, False):
                result, bytes_read = run_sample(group, spec, inputs, schedule)
                assert relative_error(result, expected) <= RUN_LIMIT
                assert all(bytes_read) == any(bytes_read) == is_first

            long = replace(
                schedule, solver="euler", sigmas=(*(1 - i / 9000 for i in range(9000)), 0.0)
            )

            def interrupt(progress: Progress) -> None:
                if progress.done >= 3:
                    raise Interrupted

            with pytest.raises(Interrupted):
                run_sample(group, spec, inputs, long, on_progress=interrupt)
            assert group.is_alive

            ranks = [*group.pids, *other.processes()]
            cut_at: list[float] = []

            def cut(progress: Progress) -> None:
                if progress.done >= 3 and not cut_at:
                    cut_at.append(time.monotonic())
                    network.cut()

            with pytest.raises(MachineLost, match=r"machine .* \(10\.99\.7\.2\) is lost"):
                run_sample(group, spec, inputs, long, on_progress=cut)
            assert time.monotonic() - cut_at[0] < LOST_LIMIT_S
            left_s = cut_at[0] + LOST_LIMIT_S - time.monotonic()
            assert wait_until(lambda: not any(map(is_running, ranks)), left_s), other.said
        assert_nothing_left(private)
        assert wait_until(other.waits, 5), other.said
