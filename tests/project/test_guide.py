"""What the guides for contributors point to is there, and the quick tests are those that the guide says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "tests" / "README.md"
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
# A test that is pointed to, and the code below it.
EXAMPLE = re.compile(r"`(tests/\S+\.py)::(\w+)`\n\n```python\n(.*?)```", re.DOTALL)
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "web" / "docs").glob("*.md"),
    GUIDE,
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target


def test_published_pack_has_what_its_readme_links_to() -> None:
    lines = (ROOT / ".comfyignore").read_text().splitlines()
    left_out = [line.strip("/") for line in lines if line and not line.startswith("#")]
    for target in LINK.findall((ROOT / "README.md").read_text()):
        assert not any(target == name or target.startswith(f"{name}/") for name in left_out), target


def test_examples_of_the_guide_are_in_the_suite() -> None:
    examples = EXAMPLE.findall(GUIDE.read_text())
    assert len(examples) >= 7
    for path, name, code in examples:
        source = (ROOT / path).read_text()
        assert f"def {name}(" in source, f"{path}::{name}"
        missing = set(map(str.strip, code.splitlines())) - set(map(str.strip, source.splitlines()))
        assert missing == set(), f"{path}::{name}"


def test_quick_is_what_starts_nothing() -> None:
    quick = "tests/nodes/test_schedules.py"
    others = (
        "tests/ranks/test_remesh.py",  # takes rank_pool
        "tests/group/test_planes.py",  # makes a registry of its own
        "tests/group/test_group_lifeline.py",  # starts a client with groups
        "tests/comfyui/test_data_parallel.py",  # takes a server that takes comfy
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "quick"]
    done = subprocess.run(
        [*command, quick, *others], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout
    assert {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line} == {quick}
