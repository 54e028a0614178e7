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
    progress_of,
    succeed,
)
from graphs import sampled_latent
from group_kit import wait_until

from devtools.comfy_server import ComfyServer

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

LIMIT_S = 5.0
STEPS = 900
# Python runs a module of this name first; `slow` beside it is the switch.
SLOW_READS = """
import os
import time

preadv = os.preadv


def slow_preadv(*arguments):
    if os.path.exists(os.path.join(os.path.dirname(__file__), "slow")):
        time.sleep(0.15)
    return preadv(*arguments)


os.preadv = slow_preadv
"""

StartServer = Callable[[], ComfyServer]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base directory of all servers here, one after the other."""
    base = tmp_path_factory.mktemp("lifetime")
    graphs.write_files(base)
    return base


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
    base: Path,
    private: Path,
    slow_switch: Path,
) -> StartServer:
    def start() -> ComfyServer:
        env = {"TMPDIR": str(private), "PYTHONPATH": str(slow_switch.parent)}
        return comfy_server_factory(base=base, env=env)

    return start


def long_graph() -> graphs.Graph:
    """Two ranks, and more steps than any test waits for."""
    return sampled_latent(
        mesh="ulysses2", devices="cpu:2", steps=STEPS, sampler="euler", has_image=False
    )


def assert_ends_within_limit(
    server: ComfyServer, number: signal.Signals, groups: list[Group], private: Path
) -> None:
    """Send ComfyUI the signal; within 5 s the groups must be gone, folders included."""
    assert groups
    os.kill(server.pid, number)

    def leftovers() -> list[str]:
        return [item for group in groups for item in group.leftovers()]

    assert wait_until(lambda: not leftovers(), LIMIT_S), f"{leftovers()}\n{server.log[-3000:]}"
    # How long its interpreter takes to end is not the group's affair, but nothing may hold it up.
    assert wait_until(lambda: not server.is_running, 60.0), server.log[-3000:]
    assert server.stop() == (0 if number == signal.SIGINT else -number)
    assert list(private.glob("wan-dist-*")) == []
    assert leftovers() == []


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
        (signal.SIGKILL, "torch"),
        (signal.SIGKILL, "meeting"),
        (signal.SIGINT, "first rank"),
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
def test_idle_group_ends_with_comfyui(
    start_server: StartServer, private: Path, number: signal.Signals
) -> None:
    server = start_server()
    graph = long_graph()
    graph["sampler"]["inputs"]["steps"] = 2
    succeed(server, graph)
    assert_ends_within_limit(server, number, groups_of(server.pid), private)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_load_leaves_a_working_group_that_ends_with_comfyui_while_it_samples(
    start_server: StartServer, private: Path, slow_switch: Path, number: signal.Signals
) -> None:
    server = start_server()
    slow_switch.touch()
    run = BackgroundRun(server, long_graph())
    run.wait_for_steps(2, maximum=100)
    group = group_of(server)
    done = len(run.steps())
    server.interrupt()
    result = run.result()
    assert result.status == "interrupted"
    # Within a read or two, far before the end of the load.
    loaded = progress_of(result, "sampler")
    assert len(loaded) < done + 6
    assert loaded[-1][0] < 90
    assert group_of(server) == group

    slow_switch.unlink()
    again = BackgroundRun(server, long_graph())
    again.wait_for_steps(3, maximum=STEPS)
    assert group_of(server) == group
    assert_ends_within_limit(server, number, [group], private)
