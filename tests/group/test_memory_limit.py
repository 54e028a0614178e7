"""A model larger than a control group's memory is refused before it is read, and the kernel has nobody to kill.

Covered: a group of the kernel's own, where this process may make one; and one that only its files make up. Not covered:
how their files are read, in tests/mesh/test_host_memory.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from graphs import write_hollow_file
from group_kit import search_path, wait_until
from limited_client import MADE_UP_PROCESS, Outcome

from comfy_wan_dist.mesh.devices import GIB
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer

KITS = Path(__file__).parents[1] / "kits"
LIMIT = 2 * GIB
# 1.3 GiB on each of two ranks, in bfloat16.
LARGE = WanShape(dim=2048, ffn_dim=8192, num_layers=9, in_dim=48, out_dim=48)
LIMIT_NAMES = ("memory.max", "memory.limit_in_bytes")
KILL_NAMES = ("memory.events", "memory.oom_control")

# A client with two ranks imports torch three times.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group of the kernel with LIMIT bytes of memory, below this process's own, or beside it."""
    with contextlib.ExitStack() as undo:
        for own in own_groups():
            for parent in (own, own.parent):
                folder = parent / f"wan-dist-test-{os.getpid()}"
                with contextlib.suppress(OSError):
                    folder.mkdir()
                    undo.callback(remove, folder)
                    for name in LIMIT_NAMES:
                        if (folder / name).exists():
                            (folder / name).write_text(str(LIMIT))
                            yield folder
                            return
        pytest.skip("this process may not make a control group with a memory limit")


def own_groups() -> Iterator[Path]:
    """Folders of the control groups that may limit this process's memory, one for each version that is mounted."""
    mounts = re.findall(
        r"^(?:\S+ ){3}(\S+) (\S+) .*- (cgroup2?) \S+ (\S+)$",
        Path("/proc/self/mountinfo").read_text(),
        re.MULTILINE,
    )
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for root, point, kind, options in mounts:
            has_memory = "memory" in controllers.split(",") and "memory" in options.split(",")
            if path.startswith(root) and (has_memory or (kind == "cgroup2" and not controllers)):
                yield Path(point, path.removeprefix(root).lstrip("/"))


def remove(folder: Path) -> None:
    """A group can be removed once the kernel has let go of the last process in it."""

    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return not folder.exists()

    assert wait_until(is_removed, 20)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A large one that takes no room on the disk, and a small one."""
    folder = tmp_path_factory.mktemp("models")
    large, small = folder / "large.safetensors", folder / "small.safetensors"
    write_hollow_file(large, expected_parameters(LARGE))
    write_transformer(small, TINY_TRANSFORMER, seed=1)
    return large, small


def run(
    models: tuple[Path, Path],
    private: Path,
    log: Path,
    *,
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """prefix: a command that runs its arguments."""
    done = subprocess.run(
        [*prefix, sys.executable, str(KITS / "limited_client.py"), str(log), *map(str, models)],
        env={
            **os.environ,
            "TMPDIR": str(private),
            "PYTHONPATH": f"{KITS.parents[1]}:{search_path()}",
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout))


def assert_refused_unread(outcome: Outcome, large: Path) -> None:
    assert outcome.error == "InsufficientMemoryError"
    found = re.fullmatch(
        r"the 2 ranks of mesh ulysses2 together need (\S+) GiB for the model on cpu, which has (\S+) GiB free; "
        r"(?:mesh tp2 would fit|no mesh of these devices would fit: use more or larger devices)",
        outcome.message,
    )
    assert found, outcome.message
    need, free = (float(number) for number in found.groups())
    assert free < LIMIT / GIB < need
    assert outcome.read < large.stat().st_size / 100
    assert outcome.survived


def test_model_beyond_a_limit_of_the_kernel_is_refused_and_no_rank_is_killed(
    models: tuple[Path, Path], private: Path, tmp_path: Path, control_group: Path
) -> None:
    enter = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(control_group))
    outcome = run(models, private, tmp_path / "log", prefix=enter)
    assert_refused_unread(outcome, models[0])
    text = next((control_group / n).read_text() for n in KILL_NAMES if (control_group / n).exists())
    assert re.search(r"^oom_kill 0$", text, re.MULTILINE)


def test_model_beyond_a_made_up_limit_is_refused(
    models: tuple[Path, Path], private: Path, tmp_path: Path
) -> None:
    process, point = tmp_path / "self", tmp_path / "mount"
    process.mkdir()
    point.mkdir()
    (process / "mountinfo").write_text(f"30 23 0:28 / {point} rw - cgroup2 cgroup2 rw\n")
    (process / "cgroup").write_text("0::/\n")
    for name, value in (("memory.max", LIMIT), ("memory.current", GIB // 2)):
        (point / name).write_text(f"{value}\n")
    outcome = run(models, private, tmp_path / "log", env={MADE_UP_PROCESS: str(process)})
    assert_refused_unread(outcome, models[0])
    assert "which has 1.5 GiB free" in outcome.message
