"""Free host memory: what the machine has, within the limits of the control groups that this process is in.

Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_NAMES = {
    "cgroup2": ("memory.max", "memory.current", ""),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""By version: the files of limit and use, and how the counts begin that include groups below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """free: bytes. group: the folder of the control group whose limit that is; None if the machine has no more."""

    free: int
    group: Path | None


def host_memory(process: Path = Path("/proc/self")) -> HostMemory:
    """What this process could still be given."""
    memory = HostMemory(free=psutil.virtual_memory().available, group=None)
    with contextlib.suppress(OSError):  # no control groups
        for group, version in _own_groups(process):
            with contextlib.suppress(OSError, ValueError):  # no limit: no file, or "max"
                free = _left_by(group, version)
                if free < memory.free:
                    memory = HostMemory(free=free, group=group)
    return memory


def _own_groups(process: Path) -> Iterator[tuple[Path, str]]:
    """Folder and version of the process's groups and of those above them, as far as they are mounted."""
    own = {}
    for controllers, path in _lines(process / "cgroup", "[0-9]+:([^:\n]*):(.*)"):
        if not controllers:
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    mounts = _lines(process / "mountinfo", r"(?:\S+ ){3}(\S+) (\S+) .*?- (\S+) .*")
    for version, path in own.items():
        tops = {Path(_name(point)): _name(root) for root, point, kind in mounts if kind == version}
        shown = {
            point: PurePosixPath(path).relative_to(root)
            for point, root in tops.items()
            if PurePosixPath(path).is_relative_to(root)
        }
        # A container whose mounts do not show the group by the name that it has: what they show is its own part then.
        for point, below in (shown or dict.fromkeys(tops, PurePosixPath())).items():
            for part in (below, *below.parents):
                yield point / part, version


def _name(field: str) -> str:
    """A path as mountinfo writes it: white space and backslashes are octal there."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def _lines(file: Path, pattern: str) -> list[tuple[str, ...]]:
    """The groups of `pattern` in the lines that it describes. A mount may have a name of any bytes."""
    text = file.read_text(errors="surrogateescape")
    return re.findall(f"^{pattern}$", text, re.MULTILINE)


def _left_by(group: Path, version: str) -> int:
    """Bytes that the limit of a control group leaves. Raises OSError or ValueError without one.

    Files that the kernel keeps in memory count as used there, such as a model that was just read; it gives them up.
    """
    limit, used, prefix = _NAMES[version]
    left = int((group / limit).read_text()) - int((group / used).read_text())
    with contextlib.suppress(OSError):
        for count in re.findall(
            rf"^{prefix}(?:in)?active_file ([0-9]+)$",
            (group / "memory.stat").read_text(),
            re.MULTILINE,
        ):
            left += int(count)
    return max(0, left)
