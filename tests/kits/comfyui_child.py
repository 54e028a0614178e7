"""A test file run as a script beside ComfyUI, in a process of its own: stubs and arguments stay out of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def run_beside_comfyui(script: str, argument: Path, comfyui_path: Path) -> str:
    """Run script with argument; its standard output. A script that fails, or takes 120 s, fails the test."""
    search = [
        str(REPO),
        str(REPO / "tests" / "kits"),
        str(comfyui_path),
        str(REPO / "devtools" / "stubs"),
    ]
    if "PYTHONPATH" in os.environ:
        search.append(os.environ["PYTHONPATH"])
    child = subprocess.run(
        [sys.executable, script, str(argument)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout
