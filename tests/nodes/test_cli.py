"""The command line, and what `doctor` says of machines that are not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from comfy_wan_dist.cli import device_pool, main
from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.mesh.devices import GB
from comfy_wan_dist.mesh.host_memory import HostMemory, host_memory
from comfy_wan_dist.planning.calibration import measure_cpu
from comfy_wan_dist.planning.doctor import (
    GPU,
    Level,
    Machine,
    diagnose,
    examine,
    findings_text,
    parse_topology,
)
from comfy_wan_dist.planning.hardware import Calibration
from comfy_wan_dist.planning.permissions import Permissions, examine_permissions, unwritable_log

ROOT = Path(__file__).resolve().parents[2]

WORKED_EXAMPLE = (
    "plan",
    "--model",
    "ti2v-5b",
    "--size",
    "704x1280",
    "--frames",
    "121",
    "--devices",
    "8xH100-SXM",
    "--steps",
    "50",
)


# ---- plan


def test_plan_prints_a_table_without_loading_torch() -> None:
    program = (
        "import runpy, sys; sys.argv[1:] = sys.argv[1:]; "
        "sys.modules['torch'] = None; "
        "runpy.run_module('comfy_wan_dist', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *WORKED_EXAMPLE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "1280 x 704 pixels (width x height), 121 frames, 27280 tokens (31 x 22 x 40), 50 steps"
    )
    assert "\nlatency: cfg2-ulysses4. " in done.stdout
    assert "\nthroughput: dp8. " in done.stdout
    assert "\nauto: cfg2-ulysses4. " in done.stdout


@pytest.mark.parametrize("model", ["t2v-14b", "ti2v-5b"])
def test_plan_names_the_size_that_was_asked_for(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a token is 16 pixels wide or 32."""
    assert main(["plan", "--model", model, "--devices", "2xH100", "--size", "480x832"]) == 0
    assert capsys.readouterr().out.startswith("832 x 480 pixels (width x height)")


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORKED_EXAMPLE, "--json", "--cfg", "1", "--steps", "20"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["latency"]["mesh"] == "ulysses8"
    assert values["devices"] == "8xH100-SXM"
    assert values["job"]["steps"] == 20
    assert values["job"]["guided"] is False
    row = next(row for row in values["meshes"] if row["mesh"] == "ulysses8")
    assert set(row["step_sent_bytes"]) == {"ulysses"}
    assert row["memory"]["weights"] == pytest.approx(10.1e9, rel=0.01)


def test_plan_lists_the_collectives_of_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORKED_EXAMPLE, "--mesh", "ulysses2-tp2", "--cfg", "1"]) == 0
    runs, papers = capsys.readouterr().out.split("\n\n")
    sums = next(line.split() for line in runs.splitlines() if line.startswith("row-parallel"))
    assert sums[-1] == "4500"
    assert "79.92" in sums
    assert "as papers count it" in papers


def test_plan_of_cpu_ranks_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--devices", "cpu:2", "--size", "64x64", "--frames", "5"]
    assert main(arguments) == 0
    assert "measured here" in capsys.readouterr().out


def test_cpu_devices_take_what_was_measured() -> None:
    asked = []

    def measure(ranks: int) -> Calibration:
        asked.append(ranks)
        return Calibration(rate=1e9, memory=2e9, link=3e9, latency=4e-6)

    pool = device_pool("cpu:3", measure)
    assert asked == [3]
    assert pool.count == 3
    assert pool.weakest.performance("float32") == Calibration(
        rate=1e9, memory=2e9, link=3e9, latency=4e-6
    )
    with pytest.raises(ConfigError, match="cpu:0"):
        device_pool("cpu:0", measure)


def test_measuring_the_cpu_gives_possible_numbers() -> None:
    measured = measure_cpu(1)
    assert 1e8 < measured.rate < 1e13
    assert 1e8 < measured.memory < 1e13
    assert 1e7 < measured.link < 1e12
    assert 0 < measured.latency < 0.1


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--size", "15x1280"], "16 or more"),
        (["--size", "big"], "height x width"),
        (["--devices", "8xZ80"], "known devices"),
        (["--model", "nothing.safetensors"], "neither known nor a file"),
        (["--mesh", "ulysses5"], "ulysses may be"),
        (["--mesh", "auto"], "name a mesh"),
        (["--steps", "0"], "1 or more"),
    ],
)
def test_plan_refuses_with_a_sentence(
    extra: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORKED_EXAMPLE, *extra]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1


# ---- doctor

H100 = GPU(
    name="NVIDIA H100 80GB HBM3", free=79 * GB, total=80 * GB, has_bfloat16=True, peers=(0, 1)
)
SOUND = Machine(
    system="Linux",
    python=(3, 12),
    torch="2.13.0",
    torch_error="",
    torch_cuda="13.0",
    nccl="2.28.9",
    has_memfd=True,
    permissions=Permissions(),
    memory=HostMemory(free=200 * GB, group=None),
    driver_gpus=2,
    gpus=(H100, H100),
    nvlinks=frozenset({(0, 1), (1, 0)}),
)
CPU_ONLY = replace(SOUND, torch_cuda=None, nccl=None, driver_gpus=0, gpus=(), nvlinks=None)


def test_doctor_finds_nothing_wrong_with_a_sound_machine() -> None:
    findings = diagnose(SOUND)
    assert {finding.level for finding in findings} == {Level.OK}
    text = findings_text(findings)
    for words in (
        "torch 2.13.0, built for CUDA 13.0",
        "NCCL 2.28.9",
        "79.0 of 80.0 GB free",
        "Peer-to-peer access works between all GPUs",
        "NVLink joins all GPUs",
        "auto would choose cfg2 for TI2V-5B",
        "memfd works",
    ):
        assert words in text
    assert text.endswith("Nothing is wrong.")


SMALL = replace(H100, free=2 * GB)
FAULTS: tuple[tuple[Machine, Level, str], ...] = (
    (replace(SOUND, system="Windows"), Level.WRONG, "worker groups run on Linux only"),
    (replace(SOUND, python=(3, 9)), Level.WRONG, "use 3.10 or newer"),
    (replace(SOUND, has_memfd=False), Level.WRONG, "memfd_create does not work"),
    (
        replace(CPU_ONLY, torch=None, torch_error="No module"),
        Level.WRONG,
        "torch cannot be imported",
    ),
    (replace(CPU_ONLY, driver_gpus=2), Level.WRONG, "install a torch that is built for CUDA"),
    (replace(SOUND, gpus=(), nvlinks=None), Level.WRONG, "check CUDA_VISIBLE_DEVICES"),
    (replace(SOUND, nccl=None), Level.WRONG, "torch has no NCCL"),
    (
        replace(SOUND, gpus=(replace(H100, has_bfloat16=False), H100)),
        Level.WRONG,
        "GPU 0 has no bfloat16",
    ),
    (replace(SOUND, gpus=(SMALL, SMALL)), Level.WRONG, "one has 2.0 GB free"),
    (CPU_ONLY, Level.NOTE, "jobs run on the CPU"),
    (replace(SOUND, driver_gpus=4), Level.NOTE, "torch sees 2 of 4 GPUs"),
    (
        replace(SOUND, gpus=(H100, replace(H100, name="NVIDIA A100-SXM4-80GB"))),
        Level.NOTE,
        "The GPUs differ",
    ),
    (
        replace(SOUND, gpus=(replace(H100, peers=()), replace(H100, peers=()))),
        Level.NOTE,
        "No peer-to-peer access between GPUs 0-1",
    ),
    (replace(SOUND, nvlinks=frozenset()), Level.NOTE, "There is no NVLink"),
    (replace(SOUND, nvlinks=None), Level.NOTE, "whether there is NVLink is not known"),
    (
        replace(SOUND, permissions=Permissions(has_pidfds=False)),
        Level.NOTE,
        "pidfd_open or pidfd_send_signal is",
    ),
    (
        replace(SOUND, permissions=Permissions(unwritable_log=Path("/c/user"))),
        Level.NOTE,
        "/c/user cannot be written, so logs",
    ),
    (replace(SOUND, permissions=Permissions(noexec="/tmp")), Level.NOTE, "/tmp cannot be run"),
    (
        replace(SOUND, permissions=Permissions(folder_error="no folder; let TMPDIR name one")),
        Level.WRONG,
        "cannot start: no folder; let TMPDIR name one",
    ),
    (
        replace(SOUND, memory=HostMemory(free=3 * GB, group=Path("/sys/fs/cgroup/a.scope"))),
        Level.NOTE,
        "3.0 GB of host memory are free within the limit of the control group /sys/fs/cgroup/a.scope",
    ),
    (
        replace(SOUND, gpus=(replace(H100, name="Tesla T4"),) * 2),
        Level.NOTE,
        "no figures for Tesla T4",
    ),
)


@pytest.mark.parametrize(("machine", "level", "words"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_doctor_names_each_fault_in_a_sentence(machine: Machine, level: Level, words: str) -> None:
    found = [finding for finding in diagnose(machine) if words in finding.text]
    assert [finding.level for finding in found] == [level]
    assert found[0].text.endswith(".")
    is_wrong = any(finding.is_wrong for finding in diagnose(machine))
    assert is_wrong == (level is Level.WRONG)
    assert findings_text(diagnose(machine)).endswith("wrong.")


def test_doctor_reads_the_topology() -> None:
    matrix = (
        "\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\t0-31\nGPU1\tNV18\t X \tPIX\t0-31\nGPU2\tSYS\tPIX\t X \t32-63\n"
        "Legend:\n  NV# = Connection traversing a bonded set of # NVLinks\n"
    )
    assert parse_topology(matrix) == {(0, 1), (1, 0)}
    assert parse_topology("") is None


def test_doctor_finds_what_keeps_logs_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, logs = tmp_path / "user", tmp_path / "user/wan_dist_logs"
    assert unwritable_log(user) is None  # no ComfyUI
    user.touch()
    assert unwritable_log(user) == user
    user.unlink()
    logs.mkdir(parents=True)
    foreign = logs / "tp2.log"
    foreign.touch()
    assert unwritable_log(user) is None
    # Root may write everywhere, so the refusal is made up.
    monkeypatch.setattr("os.access", lambda path, _: path != foreign)
    assert unwritable_log(user) == foreign


def test_doctor_tries_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert examine_permissions().noexec == ""
    status = mock.Mock(f_flag=os.ST_NOEXEC | os.ST_NOSUID)
    monkeypatch.setattr(os, "statvfs", {str(tmp_path): status}.__getitem__)
    found = examine_permissions()
    assert (found.noexec, found.folder_error) == (str(tmp_path), "")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("comfy_wan_dist.group.folder.OTHER_PLACES", ())
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert "/nowhere: No such file" in examine_permissions().folder_error


def test_doctor_runs_here_with_the_exit_code_of_its_findings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert code == int(any(finding["level"] == "wrong" for finding in findings))
    assert code in (0, 1)
    assert any(finding["text"].startswith("torch ") for finding in findings)
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.endswith("wrong.\n")


def test_doctor_sees_this_machine() -> None:
    machine = examine()
    assert machine.system == "Linux"
    assert machine.has_memfd
    assert machine.torch is not None
    assert machine.memory.free == pytest.approx(host_memory().free, rel=0.2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("worker", "--join", "127.0.0.1:29400"),
        ("plan", "--devices", "cpu:2"),
    ],
)
def test_a_python_without_torch_is_named_in_one_sentence(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "torch" or name in (
            "comfy_wan_dist.planning.calibration",
            "comfy_wan_dist.group.machines.join",
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([*arguments]) == 2
    assert re.fullmatch(
        r"torch cannot be imported \(.+\); use the Python that ComfyUI runs with\n",
        capsys.readouterr().err,
    )
