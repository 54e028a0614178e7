"""docs/architecture.md lists the files that a job's data passes through: a traced run passes through these."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from devtools.trace_files import trace

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
MOST_FILES = 25
SOLVER = {"comfy_wan_dist/solvers/table.py", "comfy_wan_dist/solvers/unipc.py"}
"""Where the row of the solver's step may point."""


@pytest.mark.usefixtures("comfyui_path")
def test_a_warm_run_passes_its_data_through_the_files_that_the_guide_lists() -> None:
    (table,) = re.findall(r"<!-- way -->\n(.*?)<!-- end of way -->", GUIDE.read_text(), re.DOTALL)
    listed = re.findall(r"^\| \d+ \| `([^`]+)`", table, re.MULTILINE)
    passed = [entry.path for entry in trace("sampler") if entry.has_data]
    assert set(passed) - SOLVER == set(listed) - SOLVER
    assert len(listed) == len(set(listed)) <= MOST_FILES
