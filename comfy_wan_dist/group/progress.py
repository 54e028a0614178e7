"""One progress bar for a job in several pieces."""

from __future__ import annotations

from collections.abc import Sequence

from ..ipc.messages import Progress


def overall(latest: Sequence[Progress | None]) -> tuple[int, int]:
    """(done, total) over all pieces, from what each said last; None for one that has not begun.

    Units are those of the work. While all pieces load, bytes are shown as percent: their numbers are too many for a
    bar. Pieces of a job have equally much to do, so one that has not begun counts with the others' total.
    """
    working = [said for said in latest if said is not None and said.phase != "load"]
    if working:
        return sum(said.done for said in working), working[0].total * len(latest)
    percents = [100 * said.done // max(said.total, 1) for said in latest if said is not None]
    return sum(percents) // len(latest), 100
