"""A test file run as a script beside ComfyUI, in a process of its own: its arguments stay out of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from devtools.comfy_server import python_of

REPO = Path(__file__).resolve().parents[2]
# What the test imports and a ComfyUI's own environment lacks comes last.
CHILD = """
import runpy, sys
from devtools import stand_ins
stand_ins.install()
sys.path.append(sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_beside_comfyui(script: str, argument: Path, comfyui_path: Path) -> str:
    """Run script with argument; its standard output. A script that fails, or takes 120 s, fails the test."""
    search = [
        str(REPO),
        str(REPO / "tests" / "kits"),
        str(comfyui_path),
    ]
    if "PYTHONPATH" in os.environ:
        search.append(os.environ["PYTHONPATH"])
    child = subprocess.run(
        [
            python_of(comfyui_path),
            "-c",
            CHILD,
            sysconfig.get_path("purelib"),
            script,
            str(argument),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def found_beside_comfyui(script: str, argument: Path, comfyui_path: Path) -> Any:
    """What the script of `run_beside_comfyui` printed last, as JSON."""
    return json.loads(run_beside_comfyui(script, argument, comfyui_path).splitlines()[-1])
