"""The driver of a real ComfyUI, with stock nodes only."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from PIL import Image

from devtools.comfy_server import ComfyServer, ComfyServerError, Event, PromptRejected

ROOT = Path(__file__).resolve().parents[2]
STARTER = """
import sys, time
from pathlib import Path
from devtools.comfy_server import ComfyServer
server = ComfyServer(comfyui=Path(sys.argv[1]), base=Path(sys.argv[2]), packs={})
server.start()
print(server.pid, flush=True)
time.sleep(100)
"""


def picture_prompt(color: int) -> dict[str, object]:
    size = {"width": 16, "height": 16, "batch_size": 2}
    return {
        "1": {"class_type": "EmptyImage", "inputs": {**size, "color": color}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_alive(pid: int) -> bool:
    """False for a zombie too: whether one is reaped is up to the machine's init process."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_run_returns_outputs_and_events(comfy: ComfyServer) -> None:
    seen: list[Event] = []
    result = comfy.run(picture_prompt(0xFF0000), on_event=seen.append)
    assert result.status == "success", result.error
    assert [event.kind for event in result.events][-1] == "execution_success"
    assert list(result.events) == seen
    files = result.outputs["2"]["images"]
    assert len(files) == 2
    with Image.open(io.BytesIO(comfy.view(files[0]))) as image:
        assert image.convert("RGB").getpixel((3, 3)) == (255, 0, 0)


def test_run_raises_prompt_rejected_with_the_answer(comfy: ComfyServer) -> None:
    prompt = {"1": {"class_type": "NoSuchNode", "inputs": {}}}
    with pytest.raises(PromptRejected, match="NoSuchNode") as caught:
        comfy.run(prompt)
    assert caught.value.status == 400


def test_run_reports_an_error_with_its_traceback(comfy: ComfyServer) -> None:
    name = comfy.upload_image("damaged.png", b"not an image")
    prompt = {
        "1": {"class_type": "LoadImage", "inputs": {"image": name}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    result = comfy.run(prompt)
    assert result.status == "error"
    assert "UnidentifiedImageError" in result.error


def test_upload_image_reaches_load_image(comfy: ComfyServer) -> None:
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (0, 0, 255)).save(content, "PNG")
    name = comfy.upload_image("blue.png", content.getvalue())
    prompt = {
        "1": {"class_type": "LoadImage", "inputs": {"image": name}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    assert comfy.run(prompt).status == "success"


def test_start_failure_tells_the_end_of_the_log(
    comfy_server_factory: Callable[..., ComfyServer],
) -> None:
    with pytest.raises(ComfyServerError, match="unrecognized arguments: --no-such-flag"):
        comfy_server_factory(extra_args=["--no-such-flag"])


def test_killed_server_is_noticed_and_can_be_started_again(
    comfy_server_factory: Callable[..., ComfyServer],
) -> None:
    server = comfy_server_factory()
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    assert not server.is_running
    server.start()
    assert server.run(picture_prompt(1)).status == "success"
    assert server.stop() == 0


def test_server_dies_with_the_process_that_started_it(comfyui_path: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(comfyui_path), str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        try:
            assert starter.stdout is not None
            pid = int(starter.stdout.readline())
            assert is_alive(pid)
        finally:
            starter.kill()
    assert wait_until(lambda: not is_alive(pid))
