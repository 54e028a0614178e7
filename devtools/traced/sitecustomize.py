"""Notes which product files a process enters by calls: Python runs this first where its folder is on PYTHONPATH.

The folder TRACE_FOLDER says when. Its file `window`, while it is there, names for `comfyui` and for `rank` the function
with which the list of such a process begins; "" begins at once. The list ends with the return of that function, or
with the file `window` where there is none or where it is a coroutine. Each first entry is a line of `<role>.<pid>`:
time.monotonic_ns, then the path below TRACE_ROOT; another line with a `+` follows once a function of the file is given
or gives back the job's own data: a tensor, a reference to one, or what has one of these in a field, such as a message.
A model's weights do not count. All threads count; the top level of a module does not.
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
TENSORS, REFERENCE = ("Tensor", "Parameter"), "TensorRef"
"""Names of classes: here nothing may be imported that the process would not import by itself."""
MOST_ITEMS = 8


def carries_data(value: object, depth: int = 3) -> bool:
    """Whether it is or holds data, in fields and items down to `depth`."""
    kind = type(value)
    is_torch = kind.__module__.startswith("torch")
    if kind.__name__ == REFERENCE or (is_torch and kind.__name__ in TENSORS):
        return True
    if depth == 0 or is_torch:
        return False
    if isinstance(value, dict):
        parts = list(value.values())[:MOST_ITEMS]
    elif isinstance(value, (tuple, list)):
        parts = list(value[:MOST_ITEMS])
    elif hasattr(kind, "__dataclass_fields__"):
        parts = [getattr(value, name, None) for name in kind.__dataclass_fields__]
    else:
        return False
    return any(carries_data(part, depth - 1) for part in parts)


class Tracer:
    """A profile function for one process of the given role."""

    def __init__(self, role: str, *, folder: Path, root: Path) -> None:
        self._role = role
        self._window = folder / "window"
        self._list = folder / f"{role}.{os.getpid()}"
        self._root = os.path.realpath(root)
        self._places: dict[CodeType, str] = {}
        self._seen: set[str] = set()
        self._with_data: set[str] = set()
        self._is_open = False
        self._opener: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, given: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        place = self._places.get(code)
        if place is None:
            place = self._places[code] = self._place_of(code)
        if place and self._begins(frame):
            if place not in self._seen:
                self._seen.add(place)
                self._note(place)
            if place not in self._with_data:
                count = code.co_argcount + code.co_kwonlyargcount
                names = code.co_varnames[:count] if event == "call" else ()
                values = [given, *(frame.f_locals.get(name) for name in names)]
                if any(map(carries_data, values)):
                    self._with_data.add(place)
                    self._note(f"+{place}")
        if event == "return" and frame is self._opener:
            self._is_open, self._opener = False, None

    def _note(self, line: str) -> None:
        with self._list.open("a") as out:
            out.write(f"{time.monotonic_ns()} {line}\n")

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
