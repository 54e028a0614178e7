"""When a job asks ComfyUI to move its own models away. Run as a script beside ComfyUI; groups are stand-ins."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from comfyui_child import found_beside_comfyui

from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.ipc.errors import InsufficientMemoryError
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import DeviceList

SHORT = 'device "cuda:1" is short of memory'
WAYS = ("run", "run_blocking")
CASES: dict[str, tuple[str, bool, int]] = {
    # devices, whether the group runs, how often memory is short: what was done, in order
    "starts": ("cuda", False, 0),
    "runs": ("cuda", True, 0),
    "short once": ("cuda", True, 1),
    "short twice": ("cuda", True, 2),
    "short on the CPU": ("cpu", True, 1),
}
EXPECTED = {
    "starts": ["room (1,)", "work", "done"],
    "runs": ["work", "done"],
    "short once": ["work", "room (1,)", "work", "done"],
    "short twice": ["work", "room (1,)", "work", SHORT],
    "short on the CPU": ["work", SHORT],
}


def done_in(case: str, way: str) -> list[str]:
    """What a session did, in order, and how it ended."""
    from comfy_wan_dist.jobs import session
    from comfy_wan_dist.jobs.beside import LoopBeside

    kind, is_running, times_short = CASES[case]
    plane = LaunchSpec(
        degrees=MeshDegrees(),
        devices=DeviceList(kind=kind, indices=(1,)),
        log_path=Path("log"),
    )
    done: list[str] = []

    async def work(*_: Any, on_progress: Any) -> tuple[()]:
        done.append("work")
        if done.count("work") <= times_short:
            raise InsufficientMemoryError(SHORT)
        return ()

    def room(devices: DeviceList) -> None:
        if devices.kind == "cuda":
            done.append(f"room {devices.indices}")

    running = [mock.Mock(spec=plane)] if is_running else []
    for group in running:
        group.spec = plane
    groups = mock.Mock()
    groups.registry.running_groups = lambda: running
    loop = LoopBeside()
    own = session.Session(mock.Mock(run=work), (plane,), mock.Mock(), loop)
    with (
        mock.patch.object(session, "default_groups", return_value=groups),
        mock.patch.object(session, "free_devices", room),
    ):
        try:
            if way == "run":
                asyncio.run(own.run([]))
            else:
                own.run_blocking([])
            done.append("done")
        except InsufficientMemoryError as error:
            done.append(str(error))
    loop.close()
    return done


@pytest.fixture(scope="module")
def done(comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = found_beside_comfyui(
        __file__, tmp_path_factory.mktemp("unused"), comfyui_path
    )
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_room_is_made_before_a_group_starts_and_once_where_memory_was_short(
    done: dict[str, Any], case: str, way: str
) -> None:
    assert done[way][case] == EXPECTED[case]


if __name__ == "__main__":
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    print(json.dumps({way: {case: done_in(case, way) for case in CASES} for way in WAYS}))
