"""A ComfyUI imports whatever it likes of torchvision and torchaudio, the real ones where they are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from devtools import stand_ins
from devtools.comfy_server import find_comfyui, python_of

# What ComfyUI from 0.3.64 to 0.28.0 asks for when it starts, and then a use.
IMPORTS = """
import torchvision, torchaudio
import torchvision.transforms.functional as F
from torchaudio.transforms import MelScale
from torchvision import transforms
from torchvision.models.optical_flow import raft_large
from torchvision.ops import deform_conv2d, roi_align
from torchvision.transforms import InterpolationMode, ToPILImage, ToTensor
def resize(image, mode=InterpolationMode.BILINEAR): ...
def scale(image: "transforms.Normalize | None"): ...
class Own(MelScale): ...
print(getattr(torchvision, "__version__", "none"), *sys.argv[1:], __name__)
{use}
"""


def run(tmp_path: Path, *, use: str, installed: str = "") -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text("import sys\n" + IMPORTS.format(use=use))
    command = [sys.executable, stand_ins.__file__, str(script), "--argument"]
    return subprocess.run(
        command,
        env={"PYTHONPATH": installed},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("use", "named"),
    [
        ("roi_align(1)", "torchvision.ops.roi_align"),
        ("torchvision.ops.box_convert(1)", "torchvision.ops.box_convert"),
        ("torchaudio.functional.resample(1)", "torchaudio.functional"),
        ("Own()", "Own"),
    ],
)
def test_names_are_imported_and_raise_when_used(tmp_path: Path, use: str, named: str) -> None:
    done = run(tmp_path, use=use)
    assert done.stdout == "none --argument __main__\n", done.stderr
    assert done.stderr.endswith(
        f"NotImplementedError: {named} is not installed, only a stand-in for imports\n"
    )


def test_installed_package_is_never_shadowed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for folder, names in {
        "": "__version__ = '9'",
        "transforms": "Normalize = ToPILImage = ToTensor = None\nclass InterpolationMode:\n  BILINEAR = 1",
        "transforms/functional": "",
        "ops": "deform_conv2d = None\nroi_align = print",
        "models": "",
        "models/optical_flow": "raft_large = None",
    }.items():
        module = site / "torchvision" / folder / "__init__.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(names)
    done = run(tmp_path, use="roi_align('real', MelScale.__name__)", installed=str(site))
    assert done.stdout == "9 --argument __main__\nreal torchaudio.transforms.MelScale\n", (
        done.stderr
    )


def test_comfyui_may_be_named_from_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "main.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMFYUI_PATH", "host")
    # It is run in its own folder, where a relative name would mean another.
    assert find_comfyui(tmp_path) == tmp_path / "host"


@pytest.mark.parametrize("folder", ["venv", ".venv", None])
def test_comfyui_is_run_by_the_python_of_its_own_environment(
    tmp_path: Path, folder: str | None
) -> None:
    expected = sys.executable
    if folder is not None:
        expected = str(tmp_path / folder / "bin" / "python")
        Path(expected).parent.mkdir(parents=True)
        Path(expected).touch()
    assert python_of(tmp_path) == expected
