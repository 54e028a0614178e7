"""What a worker group is started from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..mesh.degrees import MeshDegrees
from ..mesh.devices import DeviceList
from ..mesh.layout import weight_layout
from ..mesh.machines import Machines, validate_machines

# The folder that holds comfy_wan_dist and workers, whatever it is called.
PACK_ROOT = Path(__file__).resolve().parents[2]
LOG_FOLDER = "wan_dist_logs"
"""Below the folder that ComfyUI keeps a user's files in."""
DEFAULT_RUNNER = "workers.runner:PlaneRunner"

GroupKey = tuple[MeshDegrees, DeviceList, str, Machines | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """One data-parallel plane to launch; groups with equal keys are interchangeable.

    devices: of this machine; the first `ranks_per_machine` of them are used, one per rank.
    machines: None for this one alone.
    log_path: the ranks' output is appended there and stays after the group's end.
    runner: `module:function` in the ranks that builds what answers requests (workers/process/loop.py).
    start_timeout_s: from launch until every rank is ready.
    """

    degrees: MeshDegrees
    devices: DeviceList
    log_path: Path
    python: str = field(default=sys.executable)
    pack_root: Path = PACK_ROOT
    runner: str = DEFAULT_RUNNER
    start_timeout_s: float = 180.0
    machines: Machines | None = None

    def __post_init__(self) -> None:
        if self.degrees.dp != 1:
            raise ValueError(
                f"mesh {self.degrees} has dp{self.degrees.dp}; a group runs one plane, so give dp 1"
            )
        validate_machines(self.degrees, self.machines)
        if self.devices.count < self.ranks_per_machine:
            raise ValueError(
                f"mesh {self.degrees} needs {self.ranks_per_machine} devices; "
                f"{self.devices.count} are given"
            )

    @property
    def world_size(self) -> int:
        return self.degrees.plane_size

    @property
    def ranks_per_machine(self) -> int:
        return self.world_size // (1 if self.machines is None else self.machines.count)

    @property
    def used_devices(self) -> DeviceList:
        """On this machine."""
        return self.devices.take(self.ranks_per_machine)

    @property
    def key(self) -> GroupKey:
        return weight_layout(self.degrees), self.used_devices, self.runner, self.machines

    def shares_devices_with(self, other: LaunchSpec) -> bool:
        """Whether the two cannot run side by side."""
        if self.machines is not None and other.machines is not None:
            return True  # other machines serve one group at a time
        mine, theirs = self.used_devices, other.used_devices
        return mine.kind == theirs.kind and not set(mine.indices).isdisjoint(theirs.indices)


def plane_specs(
    degrees: MeshDegrees,
    devices: DeviceList,
    *,
    log_folder: Path,
    machines: Machines | None = None,
) -> tuple[LaunchSpec, ...]:
    """One group for each data-parallel plane of a mesh, in the order of the planes' ranks.

    Plane i of n devices has devices i*n ... (i+1)*n - 1 of the list. Several machines make one plane.
    """
    validate_machines(degrees, machines)
    plane = replace(degrees, dp=1)
    return tuple(
        LaunchSpec(
            degrees=plane,
            devices=devices.part(index, plane.plane_size),
            machines=machines,
            log_path=log_folder
            / (f"{degrees}.log" if degrees.dp == 1 else f"{degrees}-plane{index}.log"),
        )
        for index in range(degrees.dp)
    )
