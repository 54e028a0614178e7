"""The limits of bench.json as one picture: a bar for each ratio, a mark for its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .timing import Sense

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MET, MISSED, UNDECIDED = "#3a7d44", "#b3261e", "#d9a400"
BAR_INCHES = 0.3
TITLES = {
    Sense.AT_MOST: "our time / theirs (left of the mark is good)",
    Sense.AT_LEAST: "share of the machine's two-process ceiling (right of the mark is good)",
}


def draw_chart(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG of the rows that have a ratio and a limit, one panel for each sense of limit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = [row for row in rows if row["ratio"] is not None and row["limit"] is not None]
    panels = {
        sense: [row for row in drawn if row["sense"] == sense.value]
        for sense in Sense
        if any(row["sense"] == sense.value for row in drawn)
    }
    counts = [len(of_sense) for of_sense in panels.values()]
    figure = Figure(figsize=(9, 1 + sum(1 + BAR_INCHES * count for count in counts)))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    if panels:
        all_axes = figure.subplots(
            len(panels),
            squeeze=False,
            gridspec_kw={"height_ratios": [count + 1 for count in counts]},
        )
        for (sense, of_sense), axes in zip(panels.items(), all_axes[:, 0], strict=True):
            _draw_panel(axes, TITLES[sense], of_sense)
    figure.legend(
        handles=[
            Patch(color=MET, label="limit met"),
            Patch(color=MISSED, label="limit missed"),
            Patch(color=UNDECIDED, label="machine too noisy for a verdict"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=110)


def _draw_panel(axes: Axes, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    colours = {True: MET, False: MISSED, None: UNDECIDED}
    ratios = [float(row["ratio"]) for row in rows]
    axes.barh(range(len(rows)), ratios, height=0.7, color=[colours[row["ok"]] for row in rows])
    for position, (row, ratio) in enumerate(zip(rows, ratios, strict=True)):
        limit = float(row["limit"])
        axes.vlines(limit, position - 0.42, position + 0.42, colors="black", linewidth=2)
        text = f"{ratio:.3f}, {row['sense']} {limit:g}"
        axes.text(max(ratio, limit) + 0.01, position, text, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['case']}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * max([1.0, *ratios]))
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
