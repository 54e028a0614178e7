"""A group ends with its ComfyUI, whatever the group is doing and however ComfyUI ends.

Covered: SIGINT, which lets exit handlers run, and SIGKILL, at moments from the launch of a group to its idling; what
must be gone are all processes and the private folder. Also an interrupt while a model loads. Reads are made slow where
a test needs a load to last. Not covered: the end of a rank (test_end_to_end.py), and groups without a ComfyUI
(test_group_run.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import graphs
import pytest
from comfy_kit import (
    BackgroundRun,
    Group,
    group_of,
    groups_of,
    has_torch,
    is_meeting,
    latent_of,
    progress_of,
    succeed,
)
from graphs import sampled_latent
from group_kit import wait_until

from devtools import comfy_server
from devtools.comfy_server import ComfyServer

LIMIT_S = 5.0
STEPS = 900
STUBS = Path(comfy_server.__file__).resolve().parent / "stubs"
# Python runs a module of this name first; `slow` beside it is the switch.
SLOW_READS = """
import os
import time

preadv = os.preadv


def slow_preadv(*arguments):
    if os.path.exists(os.path.join(os.path.dirname(__file__), "slow")):
        time.sleep(0.1)
    return preadv(*arguments)


os.preadv = slow_preadv
"""

StartServer = Callable[[], ComfyServer]


@pytest.fixture
def private() -> Iterator[Path]:
    """Where the server of a test makes its temporary files: short, because a socket goes there."""
    folder = Path(tempfile.mkdtemp(prefix="life-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def slow_switch(tmp_path: Path) -> Path:
    """Reads of model files are slow while this file exists."""
    folder = tmp_path / "slow reads"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW_READS)
    return folder / "slow"


@pytest.fixture
def start_server(
    comfy_server_factory: Callable[..., ComfyServer],
    tmp_path: Path,
    private: Path,
    slow_switch: Path,
) -> StartServer:
    def start() -> ComfyServer:
        graphs.write_files(tmp_path / "base")
        path = os.pathsep.join([str(slow_switch.parent), str(STUBS)])
        return comfy_server_factory(
            base=tmp_path / "base", env={"TMPDIR": str(private), "PYTHONPATH": path}
        )

    return start


def long_graph() -> graphs.Graph:
    """Two ranks, and more steps than any test waits for."""
    return sampled_latent(
        mesh="ulysses2", devices="cpu:2", steps=STEPS, sampler="euler", has_image=False
    )


def assert_ends_within_limit(
    server: ComfyServer, number: signal.Signals, groups: list[Group], private: Path
) -> None:
    """Send ComfyUI the signal; within 5 s it and its groups must be gone, folders included."""
    assert groups
    sent = time.monotonic()
    server.stop(number)

    def leftovers() -> list[str]:
        return [item for group in groups for item in group.leftovers()]

    wait_until(lambda: not leftovers(), LIMIT_S - (time.monotonic() - sent))
    assert leftovers() == []
    assert time.monotonic() - sent < LIMIT_S
    assert list(private.glob("wan-dist-*")) == []


# What a start looks like from outside, in the order in which it happens.
MOMENTS: dict[str, Callable[[Group], bool]] = {
    "launched": lambda group: True,
    "first rank": lambda group: bool(group.ranks),
    "torch": lambda group: len(group.ranks) == 2 and any(map(has_torch, group.ranks)),
    "meeting": is_meeting,
}


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGKILL, "launched"),
        (signal.SIGKILL, "first rank"),
        (signal.SIGKILL, "torch"),
        (signal.SIGKILL, "meeting"),
        (signal.SIGINT, "launched"),
        (signal.SIGINT, "torch"),
    ],
)
def test_starting_group_ends_with_comfyui(
    start_server: StartServer, private: Path, number: signal.Signals, moment: str
) -> None:
    server = start_server()
    run = BackgroundRun(server, long_graph())
    groups = run.wait_for(
        lambda: [group for group in groups_of(server.pid) if MOMENTS[moment](group)]
    )
    assert run.steps() == []
    assert_ends_within_limit(server, number, groups, private)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_loading_group_ends_with_comfyui(
    start_server: StartServer, private: Path, slow_switch: Path, number: signal.Signals
) -> None:
    server = start_server()
    slow_switch.touch()
    run = BackgroundRun(server, long_graph())
    run.wait_for_steps(2, maximum=100)
    groups = groups_of(server.pid)
    assert_ends_within_limit(server, number, groups, private)
    assert [event for event in run.steps() if event.data["max"] == STEPS] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_sampling_group_ends_with_comfyui(
    start_server: StartServer, private: Path, number: signal.Signals
) -> None:
    server = start_server()
    run = BackgroundRun(server, long_graph())
    run.wait_for_steps(3, maximum=STEPS)
    assert_ends_within_limit(server, number, groups_of(server.pid), private)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_load_leaves_a_working_group_that_ends_with_comfyui(
    start_server: StartServer, private: Path, slow_switch: Path, number: signal.Signals
) -> None:
    server = start_server()
    slow_switch.touch()
    run = BackgroundRun(server, long_graph())
    run.wait_for_steps(2, maximum=100)
    group = group_of(server)
    asked = time.monotonic()
    server.interrupt()
    result = run.result()
    assert result.status == "interrupted"
    # One slow read and the poll for the interrupt, far less than the rest of the load.
    assert time.monotonic() - asked < 2.0
    assert progress_of(result, "sampler")[-1][0] < 90

    slow_switch.unlink()
    graph = long_graph()
    graph["sampler"]["inputs"]["steps"] = 2
    result = succeed(server, graph)
    assert latent_of(server, result).isfinite().all()
    assert progress_of(result, "sampler")[-2:] == [(1, 2), (2, 2)]
    assert group_of(server) == group
    assert_ends_within_limit(server, number, [group], private)
