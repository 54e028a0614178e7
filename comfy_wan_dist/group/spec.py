"""What a worker group is started from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
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
        """Whether the two cannot run side by side."""
        mine, theirs = self.used_devices, other.used_devices
        return mine.kind == theirs.kind and not set(mine.indices).isdisjoint(theirs.indices)


def plane_specs(
    degrees: MeshDegrees, devices: DeviceList, *, log_folder: Path
) -> tuple[LaunchSpec, ...]:
    """One group for each data-parallel plane of a mesh, in the order of the planes' ranks.

    Plane i of n devices has devices i*n ... (i+1)*n - 1 of the list.
    """
    plane = replace(degrees, dp=1)
    return tuple(
        LaunchSpec(
            degrees=plane,
            devices=devices.part(index, plane.plane_size),
            log_path=log_folder
            / (f"{degrees}.log" if degrees.dp == 1 else f"{degrees}-plane{index}.log"),
        )
        for index in range(degrees.dp)
    )
