"""Notes which product files a process enters by calls: Python runs this first where its folder is on PYTHONPATH.

The folder TRACE_FOLDER says when. Its file `window`, while it is there, names for `comfyui` and for `rank` the function
with which the list of such a process begins; "" begins at once. The list ends with the return of that function, or
with the file `window` where there is none or where it is a coroutine. Each first entry is a line of `<role>.<pid>`:
time.monotonic_ns, then the path below TRACE_ROOT. All threads count; the top level of a module does not.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PRODUCT = ("comfy_wan_dist", "workers")


class Tracer:
    """A profile function for one process of the given role."""

    def __init__(self, role: str, *, folder: Path, root: Path) -> None:
        self._role = role
        self._window = folder / "window"
        self._list = folder / f"{role}.{os.getpid()}"
        self._root = os.path.realpath(root)
        self._places: dict[CodeType, str] = {}
        self._seen: set[str] = set()
        self._is_open = False
        self._opener: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame is self._opener:
            self._is_open, self._opener = False, None
        if event != "call":
            return
        code = frame.f_code
        place = self._places.get(code)
        if place is None:
            place = self._places[code] = self._place_of(code)
        if not place or not self._begins(frame) or place in self._seen:
            return
        self._seen.add(place)
        with self._list.open("a") as out:
            out.write(f"{time.monotonic_ns()} {place}\n")

    def _place_of(self, code: CodeType) -> str:
        """Path below the root; empty for what is no function of the product."""
        if code.co_name == "<module>" or code.co_filename.startswith("<"):
            return ""
        path = os.path.relpath(os.path.realpath(code.co_filename), self._root)
        return path if path.split(os.sep)[0] in PRODUCT else ""

    def _begins(self, frame: FrameType) -> bool:
        """Whether a call lies in the window, which it may open."""
        if self._opener is not None:
            return True
        if not self._window.exists():
            self._is_open = False
            return False
        if not self._is_open:
            first = json.loads(self._window.read_text()).get(self._role)
            if first is None or first not in ("", frame.f_code.co_name):
                return False
            self._is_open = True
            is_plain = first and not frame.f_code.co_flags & inspect.CO_COROUTINE
            self._opener = frame if is_plain else None
        return True


def install() -> None:
    folder, root = os.environ.get("TRACE_FOLDER"), os.environ.get("TRACE_ROOT")
    if folder is None or root is None:
        return
    # torch's launcher says who is a rank.
    role = "rank" if "RANK" in os.environ else "comfyui" if "main.py" in _names() else ""
    if role:
        tracer = Tracer(role, folder=Path(folder), root=Path(root))
        threading.setprofile(tracer)
        sys.setprofile(tracer)


def _names() -> set[str]:
    return {os.path.basename(argument) for argument in sys.orig_argv}


install()
