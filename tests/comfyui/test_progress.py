"""A bar shows a load and then the steps, whole, also where ComfyUI sends progress as seldom as 0.28 does.

Run as a script beside ComfyUI, it has a session's job say how far it is, and prints what the page would be sent. No
server and no group: the scheduler is a stand-in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from comfyui_child import found_beside_comfyui

Said = Sequence[tuple[str, int, int]]
GIB = 2**30
LOAD: Said = [("load", done * GIB, 20 * GIB) for done in range(1, 21)]
JOBS: dict[str, Said] = {
    "load, then steps": [*LOAD, *(("sample", done, 8) for done in range(1, 9))],
    "as many steps as per cent": [*LOAD, *(("sample", done, 100) for done in range(1, 101))],
    "begun again": [
        *(("sample", done, 8) for done in range(1, 8)),
        *(("sample", done, 8) for done in range(1, 9)),
    ],
    "loaded again": [*LOAD[:15], *LOAD, *(("sample", done, 8) for done in range(1, 9))],
}


class Throttled:
    """As ComfyUI 0.28's bar: its first value and what reaches the total are sent, others only if clearly above the
    last one sent, and later. The clock stands still here, so that no others are."""

    def __init__(self, send: Callable[[int, int], None], total: int) -> None:
        self._send = send
        self._total = total
        self._last = -1

    def update_absolute(self, value: int, total: int | None = None) -> None:
        self._total = total or self._total
        value = min(value, self._total)
        if self._last < 0 or value >= self._total:
            self._send(value, self._total)
            self._last = value


def shown_of(job: Said, bar: Callable[[Callable[[int, int], None]], Any]) -> list[tuple[int, int]]:
    """(value, total) of all that a bar sends while a job says this."""
    import comfy.utils

    from comfy_wan_dist.ipc.messages import Progress
    from comfy_wan_dist.jobs.beside import LoopBeside
    from comfy_wan_dist.jobs.session import Session

    sent: list[tuple[int, int]] = []

    class Over(Exception): ...

    async def run(*_: Any, on_progress: Any) -> None:
        for phase, done, total in job:
            on_progress(0, Progress(id="", phase=phase, done=done, total=total))
        raise Over

    loop = LoopBeside()
    session = Session(mock.Mock(run=run), (), mock.Mock(), loop)
    own = bar(lambda value, total: sent.append((value, total)))
    with mock.patch.object(comfy.utils, "ProgressBar", own), contextlib.suppress(Over):
        asyncio.run(session.run([mock.Mock()]))
    loop.close()
    return sent


def show_all() -> dict[str, dict[str, list[tuple[int, int]]]]:
    """By bar and job. The host's own bar has all the time between two values that it wants."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.utils

    own = comfy.utils.ProgressBar

    def host(send: Callable[[int, int], None]) -> Any:
        comfy.utils.set_progress_bar_global_hook(
            lambda value, total, _preview, **_context: send(value, total)
        )
        return own

    shown = {
        "stand-in": {
            name: shown_of(job, lambda send: lambda total: Throttled(send, total))
            for name, job in JOBS.items()
        }
    }
    with mock.patch.object(time, "perf_counter", side_effect=count()):
        shown["host"] = {name: shown_of(job, host) for name, job in JOBS.items()}
    return shown


@pytest.fixture(scope="module")
def shown(comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = found_beside_comfyui(
        __file__, tmp_path_factory.mktemp("unused"), comfyui_path
    )
    return found


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("bar", ["stand-in", "host"])
def test_load_and_steps_are_both_seen_begun_and_complete(
    shown: dict[str, Any], bar: str, job: str
) -> None:
    sent = [tuple(position) for position in shown[bar][job]]
    steps = JOBS[job][-1][2]
    if any(phase == "load" for phase, _, _ in JOBS[job]):
        load, sent = sent[: sent.index((100, 100)) + 1], sent[sent.index((100, 100)) + 1 :]
        assert load[0] == (5, 100)
        assert load.count((5, 100)) == 2 - (job != "loaded again")
    assert sent[0] == (1, steps)
    assert sent[-1] == (steps, steps)
    assert sent.count((1, steps)) == 1 + (job == "begun again")
    if bar == "host" and job == "as many steps as per cent":
        assert sent == [(done, 100) for done in range(1, 101)]


if __name__ == "__main__":
    print(json.dumps(show_all()))
