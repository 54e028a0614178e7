"""The tracer behind `python -m devtools.trace_files`, on files that look like the product's."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from comfy_wan_dist.ipc.messages import TensorRef
from devtools.trace_files import Entry, read_lists
from devtools.traced.sitecustomize import Tracer, carries_data

SOURCES = {
    "workers/one.py": "def start(then):\n    return then()\n",
    "workers/two.py": "def go():\n    return 2\n",
    "devtools/tool.py": "def help():\n    return 3\n",
    "comfy_wan_dist/three.py": "async def execute(then):\n    return then()\n",
}


class Program:
    """Functions of SOURCES below a root of their own, called under a tracer."""

    def __init__(self, folder: Path) -> None:
        self.root, self.lists = folder / "root", folder / "lists"
        self.lists.mkdir()
        self.names: dict[str, Callable[..., object]] = {}
        for path, source in SOURCES.items():
            exec(compile(source, str(self.root / path), "exec"), self.names)

    def open_window(self, **first: str) -> None:
        (self.lists / "window").write_text(json.dumps(first))

    def close_window(self) -> None:
        (self.lists / "window").unlink()

    def traced(self, role: str, *calls: Callable[[], object]) -> list[Entry]:
        before = sys.getprofile()
        sys.setprofile(Tracer(role, folder=self.lists, root=self.root))
        try:
            for call in calls:
                call()
        finally:
            sys.setprofile(before)
        return read_lists(self.lists)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def paths(entries: list[Entry]) -> list[str]:
    return [entry.path for entry in entries]


def test_files_are_listed_once_in_the_order_of_their_first_call(program: Program) -> None:
    start, go, tool = (program.names[name] for name in ("start", "go", "help"))
    program.open_window(rank="")
    found = program.traced("rank", lambda: start(go), tool, lambda: start(go), go)
    assert paths(found) == ["workers/one.py", "workers/two.py"]


def test_nothing_is_listed_outside_the_window_or_in_other_processes(program: Program) -> None:
    go = program.names["go"]
    assert program.traced("rank", go) == []
    program.open_window(rank="")
    assert program.traced("comfyui", go) == []
    found = program.traced("rank", program.close_window, go)
    assert found == []


def test_a_function_opens_the_list_and_its_return_ends_it(program: Program) -> None:
    start, go = program.names["start"], program.names["go"]
    program.open_window(rank="start")
    found = program.traced("rank", go, lambda: start(int), go)
    assert paths(found) == ["workers/one.py"]


def test_a_coroutine_opens_the_list_until_the_window_closes(program: Program) -> None:
    execute, go = program.names["execute"], program.names["go"]

    def run_to_its_end() -> None:
        with pytest.raises(StopIteration):
            execute(int).send(None)  # type: ignore[attr-defined]

    program.open_window(comfyui="execute")
    found = program.traced("comfyui", go, run_to_its_end, go)
    assert paths(found) == ["comfy_wan_dist/three.py", "workers/two.py"]


def test_lists_of_two_processes_are_merged_by_time(tmp_path: Path) -> None:
    (tmp_path / "window").write_text("{}")
    (tmp_path / "comfyui.10").write_text("1 a\n4 b\n5 +a\n")
    (tmp_path / "rank.11").write_text("2 c\n3 a\n6 +c\n")
    assert read_lists(tmp_path) == [
        Entry(path="b", roles=("comfyui",), has_data=False),
        Entry(path="a", roles=("comfyui", "rank"), has_data=True),
        Entry(path="c", roles=("rank",), has_data=True),
    ]


@dataclass
class Message:
    parts: tuple[object, ...]


def test_data_is_seen_in_fields_and_items_but_not_in_models() -> None:
    ref = TensorRef(buffer=0, offset=0, dtype="float32", shape=(1,))
    for data in (torch.ones(1), ref, [ref], {"x": torch.ones(1)}, Message(({"x": ref},))):
        assert carries_data(data)
    for other in (1, "text", Message((1,)), torch.nn.Linear(1, 1), {"x": object()}, torch.float32):
        assert not carries_data(other)


def test_calls_of_threads_count(program: Program) -> None:
    go = program.names["go"]
    program.open_window(rank="")
    tracer = Tracer("rank", folder=program.lists, root=program.root)
    threading.setprofile(tracer)
    try:
        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
    finally:
        threading.setprofile(None)
    assert paths(read_lists(program.lists)) == ["workers/two.py"]
