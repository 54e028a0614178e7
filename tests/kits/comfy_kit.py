"""What the tests against a real ComfyUI share: prompts in the background, saved latents, and a group's processes.

Processes are found in /proc by their parents, not by what the pack says about itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from group_kit import is_running, processes_naming
from safetensors.torch import load_file
from torch import Tensor

from comfy_wan_dist.ipc.paths import RANK_STORE_NAME
from devtools.comfy_server import ComfyServer, Event, PromptResult

WAIT_S = 100.0
POLL_S = 0.03


# ---- prompts


def succeed(server: ComfyServer, graph: Mapping[str, Any]) -> PromptResult:
    """Run a prompt that must succeed."""
    result = server.run(graph)
    assert result.status == "success", result.error
    return result


def latent_of(server: ComfyServer, result: PromptResult, node: str = "save") -> Tensor:
    """What a SaveLatent node wrote."""
    (file,) = result.outputs[node]["latents"]
    path = server.base / file["type"] / file["subfolder"] / file["filename"]
    return load_file(path)["latent_tensor"]


def tensors_of(server: ComfyServer, result: PromptResult, node: str) -> dict[str, Tensor]:
    """What `graphs.save_tensors` had saved of a node."""
    (file,) = result.outputs[f"tensors {node}"]["tensors"]
    return load_file(server.base / file["type"] / file["subfolder"] / file["filename"])


def progress_of(result: PromptResult, node: str) -> list[tuple[int, int]]:
    """(value, max) of a node's progress events."""
    events = result.of_kind("progress")
    return [(e.data["value"], e.data["max"]) for e in events if e.data["node"] == node]


def assert_counted(result: PromptResult, node: str, total: int) -> None:
    """A node's bar counted up to `total`. A host may leave out any number but the last."""
    seen = [value for value, most in progress_of(result, node) if most == total]
    assert seen, progress_of(result, node)
    assert seen == sorted(set(seen))
    assert 1 <= seen[0] <= seen[-1] == total


def error_of(result: PromptResult) -> Event:
    """The execution_error of a prompt that must fail."""
    assert result.status == "error", f"the prompt ended with {result.status}"
    (event,) = result.of_kind("execution_error")
    return event


class BackgroundRun:
    """A prompt that runs in a thread of its own."""

    def __init__(self, server: ComfyServer, graph: Mapping[str, Any]) -> None:
        self.events: list[Event] = []
        self._result: PromptResult | None = None
        self._error: Exception | None = None

        def run() -> None:
            try:
                self._result = server.run(graph, on_event=self.events.append)
            except Exception as error:  # the server is killed in some tests
                self._error = error

        self._thread = threading.Thread(target=run, name="prompt", daemon=True)
        self._thread.start()

    def result(self) -> PromptResult:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the prompt does not end"
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` is true, which must happen before the prompt ends; returns its value."""
        deadline = time.monotonic() + WAIT_S
        while True:
            ended = not self._thread.is_alive()
            if value := condition():
                return value
            if ended:
                raise AssertionError(f"the prompt ended first: {self._result or self._error}")
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(POLL_S)

    def steps(self, node: str = "sampler") -> list[Event]:
        """Progress events of a node so far."""
        events = list(self.events)
        return [e for e in events if e.kind == "progress" and e.data["node"] == node]

    def wait_for_steps(self, count: int, *, maximum: int, node: str = "sampler") -> None:
        """Wait until a node's bar has shown `count` of `maximum`."""
        self.wait_for(
            lambda: any(
                e.data["max"] == maximum and e.data["value"] >= count for e in self.steps(node)
            )
        )


# ---- processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A worker group as /proc shows it. `ranks` are those that exist, in the order of their numbers."""

    launcher: int
    ranks: tuple[int, ...]
    mesh: str
    folder: Path

    @property
    def pids(self) -> tuple[int, ...]:
        return self.launcher, *self.ranks

    def leftovers(self) -> list[str]:
        """What is left of the group: known processes, others that name its folder, the folder."""
        pids = sorted({*filter(is_running, self.pids), *processes_naming(str(self.folder))})
        return [f"process {pid}" for pid in pids] + [str(self.folder)] * self.folder.exists()


def groups_of(server_pid: int) -> list[Group]:
    """Every group that is a child of this ComfyUI, however far its start has come."""
    groups = []
    for launcher in _children(server_pid):
        command = _command(launcher)
        if "workers.process.launcher" not in command:
            continue
        ranks = [pid for pid in _children(launcher) if "workers.process.main" in _command(pid)]
        groups.append(
            Group(
                launcher=launcher,
                ranks=tuple(sorted(ranks, key=_rank_number)),
                mesh=command[command.index("--mesh") + 1],
                folder=Path(command[command.index("--folder") + 1]),
            )
        )
    return groups


def group_of(server: ComfyServer) -> Group:
    """The one group that this ComfyUI has."""
    (group,) = groups_of(server.pid)
    return group


def has_torch(pid: int) -> bool:
    """Whether the process has loaded torch's libraries."""
    try:
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def is_meeting(group: Group) -> bool:
    """Whether ranks have begun to join each other, the last part of a start."""
    return (group.folder / RANK_STORE_NAME).exists()


def bytes_read(pids: tuple[int, ...]) -> list[int]:
    """What each process has asked of read calls since its start, cached or not."""
    return [int(Path(f"/proc/{pid}/io").read_text().split("rchar:")[1].split()[0]) for pid in pids]


def _children(parent: int) -> list[int]:
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_bytes()
            except OSError:
                continue
            # The name in parentheses may hold anything: count from its end.
            if int(status.rpartition(b")")[2].split()[1]) == parent:
                children.append(int(entry.name))
    return children


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _rank_number(pid: int) -> int:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return -1
    return next((int(e[5:]) for e in environment if e.startswith(b"RANK=")), -1)
