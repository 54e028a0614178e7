"""How the end of a process is noticed where the system, or this Python, has no pidfds."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from comfy_wan_dist.group import process
from comfy_wan_dist.group.folder import PrivateFolder
from comfy_wan_dist.group.process import ProcessHandle, has_pidfds


def test_an_end_is_heard_though_files_were_too_many_for_a_while() -> None:
    child = subprocess.Popen(["sleep", "60"])
    looked: list[int] = []
    is_running = psutil.Process.is_running

    def refuse_first(self: psutil.Process) -> Any:
        looked.append(self.pid)
        if len(looked) < 4:
            raise OSError(errno.EMFILE, "too many open files")
        return is_running(self)

    try:
        with (
            mock.patch.object(process, "has_pidfds", return_value=False),
            mock.patch.object(psutil.Process, "is_running", refuse_first),
        ):
            handle = ProcessHandle(child.pid)
            assert not handle.wait(0.3)
            handle.send_signal(signal.SIGKILL)
            assert handle.wait(10)
            handle.close()
    finally:
        child.kill()
        child.wait(10)
    assert len(looked) > 4


def test_a_python_without_pidfds_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert not has_pidfds()


def test_a_folder_is_found_where_tempfile_finds_none() -> None:
    nowhere = FileNotFoundError(errno.ENOENT, "no usable temporary directory")
    with mock.patch("tempfile.gettempdir", side_effect=nowhere):
        folder = PrivateFolder()
    try:
        assert folder.path.parent != Path.cwd()
        assert folder.path.stat().st_mode & 0o777 == 0o700
    finally:
        folder.remove()
