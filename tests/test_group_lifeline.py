"""When ComfyUI's process is killed, whenever, no process and no folder of its group stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from group_kit import TESTS, processes_naming, search_path, wait_until


@pytest.fixture
def private() -> Iterator[Path]:
    """Where the client's group makes its folder; pytest's own may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="wdt-") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("moment", "delay_s"),
    [
        ("launched", 0.0),
        ("launched", 0.2),
        ("launched", 1.5),
        ("hello", 0.0),
        ("hello", 1.0),
        ("idle", 0.0),
        ("job", 0.0),
        ("stuck", 0.0),
    ],
)
def test_killed_client_leaves_nothing(
    private: Path, tmp_path: Path, moment: str, delay_s: float
) -> None:
    client = subprocess.Popen(
        [sys.executable, str(TESTS / "group_client.py"), str(tmp_path / "log"), moment],
        env={
            **os.environ,
            "TMPDIR": str(private),
            "PYTHONPATH": f"{TESTS.parent}:{search_path()}",
        },
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    try:
        assert client.stdout.readline() == b"there\n"
        time.sleep(delay_s)
        assert len(list(private.iterdir())) == 1
        expected = 1 if moment == "launched" else 3 if moment != "hello" else 2
        assert len(processes_naming(str(private))) >= expected
    finally:
        client.kill()
        client.wait()
        client.stdout.close()

    def is_clean() -> bool:
        return not processes_naming(str(private)) and not list(private.iterdir())

    assert wait_until(is_clean, 5), (processes_naming(str(private)), list(private.iterdir()))
