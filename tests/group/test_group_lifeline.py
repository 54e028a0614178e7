"""When ComfyUI's process is killed, whenever, no process and no folder of its group stays."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from group_kit import KITS, processes_naming, start_client, wait_until


@pytest.fixture
def private() -> Iterator[Path]:
    """Where the client's group makes its folder; pytest's own may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="wdt-") as folder:
        yield Path(folder)


def is_clean(private: Path) -> bool:
    return not processes_naming(str(private)) and not list(private.iterdir())


@pytest.mark.parametrize(
    ("moment", "delay_s"),
    [
        ("launched", 0.0),
        ("launched", 0.2),
        ("launched", 1.5),
        ("hello", 0.0),
        ("hello", 1.0),
        ("idle", 0.0),
        ("forked", 0.0),
        ("job", 0.0),
        ("stuck", 0.0),
    ],
)
def test_killed_client_leaves_nothing(
    private: Path, tmp_path: Path, moment: str, delay_s: float
) -> None:
    client = start_client(private, tmp_path / "log", moment)
    try:
        time.sleep(delay_s)
        assert len(list(private.iterdir())) == 1
        expected = {"launched": 1, "hello": 2}.get(moment, 3)
        assert len(processes_naming(str(private))) >= expected
    finally:
        client.kill()
        client.wait()
    assert wait_until(lambda: is_clean(private), 5), processes_naming(str(private))


def test_client_that_becomes_another_program_leaves_nothing(private: Path, tmp_path: Path) -> None:
    """As ComfyUI restarts itself, while another pack's forked child has copies of its descriptors."""
    client = start_client(private, tmp_path / "log", "execed")
    try:
        assert wait_until(lambda: is_clean(private), 5), processes_naming(str(private))
        assert client.poll() is None
    finally:
        client.kill()
        client.wait()


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_groups_work_and_end_where_pidfds_are_refused(
    private: Path, tmp_path: Path, error: str
) -> None:
    """As by old seccomp profiles and by gVisor."""
    refusing = [sys.executable, str(KITS / "without_pidfd.py"), error]
    client = start_client(private, tmp_path / "log", "leased", prefix=refusing)
    client.send_signal(signal.SIGINT)
    assert client.wait(20) == 0
    assert is_clean(private)
    client = start_client(private, tmp_path / "log", "stuck", prefix=refusing)
    client.kill()
    client.wait()
    assert wait_until(lambda: is_clean(private), 5), processes_naming(str(private))


@pytest.mark.parametrize(
    "surroundings",
    [
        ("sh", "-c", "trap '' INT HUP; exec \"$@\"", "nohup"),
        ("env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME", "LC_ALL=C"),
    ],
)
def test_groups_work_and_end_in_bare_surroundings(
    private: Path, tmp_path: Path, surroundings: Sequence[str]
) -> None:
    client = start_client(private, tmp_path / "log", "stuck", prefix=surroundings)
    client.terminate()
    client.wait()
    assert wait_until(lambda: is_clean(private), 5), processes_naming(str(private))


def test_exit_of_the_client_ends_its_groups_in_order(private: Path, tmp_path: Path) -> None:
    client = start_client(private, tmp_path / "log", "leased")
    client.send_signal(signal.SIGINT)
    assert client.wait(20) == 0
    assert is_clean(private)
    assert "ending:" not in (tmp_path / "log").read_text()  # shut down, not cut off
