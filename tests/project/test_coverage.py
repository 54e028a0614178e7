"""`make coverage` counts the lines that only ranks run."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

from comfy_wan_dist.mesh import degrees

ROOT = Path(__file__).resolve().parents[2]
# The starting process never calls what is measured.
PROGRAM = """
from devtools.rank_pool import RankPool

def parse(rank, text):
    from comfy_wan_dist.mesh.degrees import parse_mesh
    return str(parse_mesh(text))

def main():
    with RankPool() as pool:
        assert pool.run(1, parse, "cfg2") == ["cfg2"]
"""
START = """
import program

if __name__ == "__main__":
    program.main()
"""


# Like whatever starts processes of its own; see OUTSIDE_THE_TEST in tests/conftest.py.
@pytest.mark.usefixtures("private")
def test_lines_of_ranks_count(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "start.py").write_text(START)
    # Without what `make coverage` itself hands to the processes below it.
    inherited = {k: v for k, v in os.environ.items() if k != "COVERAGE_PROCESS_CONFIG"}
    env = {
        **inherited,
        "COVERAGE_FILE": str(tmp_path / "data"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
    }
    for command in (["run", str(tmp_path / "start.py")], ["combine", "--quiet"]):
        done = subprocess.run(
            [sys.executable, "-m", "coverage", *command],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
    data = coverage.CoverageData(str(tmp_path / "data"))
    data.read()
    lines, start = inspect.getsourcelines(degrees.parse_mesh)
    assert degrees.__file__ is not None
    measured = set(data.lines(degrees.__file__) or ())
    # More than the line of its `def`.
    assert measured & set(range(start + 1, start + len(lines)))
