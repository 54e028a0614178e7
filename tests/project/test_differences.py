"""docs/differences.md names tests that there are. That it is complete: test_refusals.py, and where cases are."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_every_difference_names_its_tests() -> None:
    lines = (REPO / "docs" / "differences.md").read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| (?!---|file |graph )", line)]
    assert len(rows) > 10
    for row in rows:
        *_, cell, _ = (
            row.split(" | ") if row.endswith(" | ") else [*row.rstrip("|").split(" | "), ""]
        )
        named = re.findall(r"`(\S+?)::(\w+)`(?: \[([^]]+)\])?", cell)
        assert named, row
        for file, function, cases in named:
            text = (REPO / file).read_text()
            assert f"def {function}(" in text, row
            kits = REPO.glob("tests/kits/*.py")
            text += "".join(
                kit.read_text()
                for kit in kits
                if re.search(rf"^(?:from|import) {kit.stem}\b", text, re.MULTILINE)
            )
            for case in filter(None, cases.split(", ")):
                assert f'"{case}"' in text, case
