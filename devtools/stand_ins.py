"""Runs a script without torchvision and torchaudio, if need be: `stand_ins.py SCRIPT [ARGUMENT ...]`.

ComfyUI imports both when it starts, and they would have to match torch's build. Covered: importing any name of them;
using one raises. What is installed is never shadowed. Not covered: package metadata, so that transformers still sees
them as not installed.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = ("torchvision", "torchaudio")


class _StandIn(type):
    """The type of a name: its attributes are the name again, so that an enum's member may be a default."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *_args: object, **_kwargs: object) -> Any:
        raise NotImplementedError(f"{cls.__name__} is not installed, only a stand-in for imports")


class _Finder(MetaPathFinder, Loader):
    """Makes modules of PACKAGES when no other finder has them."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_known = name.partition(".")[0] in PACKAGES
        return ModuleSpec(name, self, is_package=True) if is_known else None

    def exec_module(self, module: ModuleType) -> None:
        def stand_in(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _StandIn(f"{module.__name__}.{name}", (), {})

        module.__getattr__ = stand_in  # type: ignore[method-assign]


def install() -> None:
    """Have PACKAGES stood in for in this process, where they are not installed."""
    sys.meta_path.append(_Finder())


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
