"""Measure, and write out/bench.json and out/bench.png: `python -m benchmarks.bench [--section NAME]`.

Running one section replaces its rows and keeps those of the others. A missed limit is a row with `ok` false, a limit
without a verdict one with `ok` null; the exit status tells of them only with --strict.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from . import bridge, denoise, mesh, transfer, vae
from .chart import draw_chart
from .timing import Row

OUT = Path(__file__).resolve().parent.parent / "out"

logger = logging.getLogger(__name__)


Report = Callable[[Row], None]


class Measure(Protocol):
    """Measures a section and reports its rows, each as soon as it is there."""

    def __call__(self, *, budget_s: float, report: Report) -> None: ...


SECTIONS: dict[str, tuple[Measure, float]] = {
    denoise.SECTION: (denoise.measure, 300.0),
    transfer.SECTION: (transfer.measure, 60.0),
    mesh.SECTION: (mesh.measure, 300.0),
    vae.SECTION: (vae.measure, 120.0),
    bridge.SECTION: (bridge.measure, 60.0),
}
"""Each section with its default budget, in measured seconds for each group of things compared."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.bench", description=__doc__)
    parser.add_argument("--section", choices=SECTIONS, help="measure only this one")
    parser.add_argument(
        "--budget",
        type=float,
        help="measured seconds after which a comparison is given up as too noisy",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if a limit is missed or has no verdict"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        logger.info(describe(row))

    for name, (measure, default_budget_s) in SECTIONS.items():
        if options.section in (None, name):
            logger.info("section %s", name)
            measure(budget_s=options.budget or default_budget_s, report=report)
            write_results(OUT, rows)
    return 1 if options.strict and any(is_unmet(row) for row in rows) else 0


def is_unmet(row: Row) -> bool:
    """Whether the row's limit is missed or without a verdict."""
    return row.limit is not None and row.ok is not True


def write_results(folder: Path, rows: Sequence[Row]) -> None:
    """Write bench.json and bench.png: `rows`, and what is there of other sections."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.json"
    merged = merge_rows(json.loads(path.read_text()) if path.exists() else [], rows)
    path.write_text(json.dumps(merged, indent=1) + "\n")
    draw_chart(merged, folder / "bench.png")


def merge_rows(old: Sequence[dict[str, Any]], new: Sequence[Row]) -> list[dict[str, Any]]:
    """Sections in `new` take the place of the same ones in `old`."""
    replaced = {row.section for row in new}
    return [row for row in old if row["section"] not in replaced] + [asdict(row) for row in new]


def describe(row: Row) -> str:
    """The row as one line."""
    words = [f"{row.case}:"]
    if row.ours_s is not None and row.other_s is not None:
        words.append(f"{row.ours_s * 1e3:.1f} ms, other {row.other_s * 1e3:.1f} ms,")
    if row.ratio is not None:
        words.append(f"ratio {row.ratio:.3f}")
    if row.limit is not None:
        verdict = {True: "met", False: "MISSED", None: "no verdict"}[row.ok]
        words.append(f"({row.sense} {row.limit}: {verdict})")
    return " ".join(words) + (f" [{row.note}]" if row.note else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
