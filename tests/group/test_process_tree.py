"""How a launcher ends what is below it, where other users' processes may be hidden from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, subprocess, time
from pathlib import Path
from workers.process.process_tree import descendants, kill_descendants

read_bytes = Path.read_bytes

def read_or_refuse(path):
    if path.parts[2] == "1":
        raise PermissionError(13, "hidden", str(path))
    return read_bytes(path)

Path.read_bytes = read_or_refuse
shell = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
deadline = time.monotonic() + 20
while len(descendants(os.getpid())) < 3 and time.monotonic() < deadline:
    time.sleep(0.01)
below = descendants(os.getpid())
killed = kill_descendants()
shell.wait(20)
while descendants(os.getpid()) and time.monotonic() < deadline:
    kill_descendants()
print(len(below), killed, len(descendants(os.getpid())))
"""


def test_all_below_are_killed_though_another_process_is_hidden() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["3", "3", "0"], done.stderr
