"""What a worker group is started from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..mesh.degrees import MeshDegrees
from ..mesh.devices import DeviceList
from ..mesh.layout import weight_layout

# The folder that holds comfy_wan_dist and workers, whatever it is called.
PACK_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_RUNNER = "workers.pipeline:build_runner"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """One data-parallel plane to launch; groups with equal keys are interchangeable.

    devices: the first `degrees.plane_size` of them are used, one per rank.
    log_path: the ranks' output is appended there and stays after the group's end.
    runner: `module:function` in the ranks that builds what answers requests (workers/loop.py).
    start_timeout_s: from launch until every rank is ready.
    idle_timeout_s: end the group when nobody has used it for so long; None keeps it, as ComfyUI
    keeps its models.
    """

    degrees: MeshDegrees
    devices: DeviceList
    log_path: Path
    python: str = field(default=sys.executable)
    pack_root: Path = PACK_ROOT
    runner: str = DEFAULT_RUNNER
    start_timeout_s: float = 180.0
    idle_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.degrees.dp != 1:
            raise ValueError(
                f"mesh {self.degrees} has dp{self.degrees.dp}; a group runs one plane, so give dp 1"
            )
        if self.devices.count < self.degrees.plane_size:
            raise ValueError(
                f"mesh {self.degrees} needs {self.degrees.plane_size} devices; "
                f"{self.devices.count} are given"
            )

    @property
    def world_size(self) -> int:
        return self.degrees.plane_size

    @property
    def used_devices(self) -> DeviceList:
        return self.devices.take(self.world_size)

    @property
    def key(self) -> tuple[MeshDegrees, DeviceList, str]:
        return weight_layout(self.degrees), self.used_devices, self.runner

    def shares_devices_with(self, other: LaunchSpec) -> bool:
        """Whether the two cannot run side by side: a common device, or both on the one CPU."""
        mine, theirs = self.used_devices, other.used_devices
        if mine.kind != theirs.kind:
            return False
        return mine.kind == "cpu" or not set(mine.indices).isdisjoint(theirs.indices)
