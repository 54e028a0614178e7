"""Where the product refuses something: every `raise` of a ConfigError in its source, and which one raised an error."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from comfy_wan_dist.ipc.errors import CONFIG_ERRORS

REPO = Path(__file__).resolve().parents[2]
ROOMS = ("comfy_wan_dist", "workers")


@dataclass(frozen=True, order=True)
class Refusal:
    """place: a file and the function in it, as `comfy_wan_dist/jobs/vae.py::validate_room`. lines: of the `raise`."""

    place: str
    lines: tuple[int, int]

    @property
    def file(self) -> str:
        return self.place.partition("::")[0]

    def __str__(self) -> str:
        return f"{self.place}, line {self.lines[0]}"


def all_refusals() -> list[Refusal]:
    """In the order of the source."""
    files = {
        path.relative_to(REPO).as_posix(): ast.parse(path.read_text())
        for room in ROOMS
        for path in sorted((REPO / room).rglob("*.py"))
    }
    # Some are made by a function that says so, such as `Found.misshapen`.
    makers = set(CONFIG_ERRORS)
    for tree in files.values():
        makers |= {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.returns is not None
            if set(ast.unparse(node.returns).split(" | ")) <= CONFIG_ERRORS.keys()
        }
    return [
        Refusal(f"{file}::{function}", (node.lineno, node.end_lineno or node.lineno))
        for file, tree in files.items()
        for function, node in _raises(tree)
        if isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func).rpartition(".")[2] in makers
    ]


def _raises(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.Raise]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise):
            yield inside, node
        name = inside
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{inside}.{node.name}".lstrip(".")
        yield from _raises(node, name)


def refusal_of(error: BaseException, refusals: list[Refusal]) -> Refusal | None:
    """The one whose `raise` was run last on the way to this error."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        for each in refusals:
            is_here = frame.f_code.co_filename == str(REPO / each.file)
            if is_here and each.lines[0] <= line <= each.lines[1]:
                return each
    return None
