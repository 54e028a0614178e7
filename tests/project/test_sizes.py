"""A product file is one idea and a function fits a screen: 400 lines, and 60."""

from __future__ import annotations

import ast
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LISTS = ("define_schema", "build_parser")
"""Functions that only list a node's inputs or a command's options."""


def product_files() -> list[Path]:
    found = [
        path for room in ("comfy_wan_dist", "workers") for path in REPO.glob(f"{room}/**/*.py")
    ]
    assert len(found) > 100
    return found


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in product_files()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    long = [
        f"{path.name}::{node.name}"
        for path in product_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name not in LISTS
        and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert long == []
