"""A real ComfyUI, headless, with packs linked in, driven over HTTP and WebSocket.

Covered: start on a free loopback port, queue a prompt and collect its events, interrupt, free,
upload, view, stop or kill. Every wait has a deadline, and the server dies with the process that
started it. Not covered: the browser front end. One object may be used from several threads.
Source: the routes of ComfyUI's server.py, alike from 0.3.64 to 0.28.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from devtools.interruptible import interruptible

HERE = Path(__file__).resolve().parent
# The pack's folder in custom_nodes; users choose theirs, so it is none of the project's names.
PACK_FOLDER = "wan-dist-pack"
TEST_PACK = HERE / "comfy_pack"
BASE_FOLDERS = ("custom_nodes", "models", "input", "output", "user", "temp")
START_ATTEMPTS = 3
HTTP_TIMEOUT_S = 30.0
POLL_S = 0.05
LOG_TAIL_CHARS = 4000
# Reads until the starter closes the pipe, on purpose or by dying, then ends the server's group.
GUARD = 'read -r _; kill -s KILL -- "-$0"'
PREVIEW = 1
PREVIEW_WITH_METADATA = 4
FINAL_EVENTS = {
    "execution_success": "success",
    "execution_error": "error",
    "execution_interrupted": "interrupted",
}


class ComfyServerError(Exception):
    """The server did not start, died, or answered what it should not."""


class PromptRejected(ComfyServerError):
    """Validation refused the prompt. Attributes: status (HTTP), body (ComfyUI's answer)."""

    def __init__(self, *, status: int, body: Any) -> None:
        super().__init__(f"prompt rejected with HTTP {status}: {json.dumps(body)[:2000]}")
        self.status = status
        self.body = body


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One WebSocket message. `kind` is ComfyUI's type, or "preview" for a binary one.

    A preview has the encoded picture in `image` and its metadata, if ComfyUI sent any, in `data`.
    `at_s` is time.monotonic() on arrival.
    """

    kind: str
    at_s: float
    data: Mapping[str, Any] = field(default_factory=dict)
    image: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """How a prompt ended: `status` is success, error or interrupted; `outputs` is by node id."""

    prompt_id: str
    status: str
    wall_s: float
    events: tuple[Event, ...]
    outputs: Mapping[str, Any]

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def error(self) -> str:
        """The exception's type, message and traceback; empty unless status is error."""
        lines: list[str] = []
        for event in self.of_kind("execution_error"):
            lines.append(f"{event.data['exception_type']}: {event.data['exception_message']}")
            lines.extend(event.data["traceback"])
        return "\n".join(lines)


def find_comfyui(root: Path) -> Path:
    """The ComfyUI to run: COMFYUI_PATH, else the one that set-up unpacks below `root`.

    Raises: FileNotFoundError when there is none.
    """
    path = Path(os.environ.get("COMFYUI_PATH") or root / ".comfy" / "ComfyUI").absolute()
    if not (path / "main.py").is_file():
        raise FileNotFoundError(
            f"no ComfyUI at {path}: run `python3 scripts/setup_env.py test comfyui`, "
            "or set COMFYUI_PATH to a ComfyUI folder"
        )
    return path


def python_of(comfyui: Path) -> str:
    """The interpreter of the virtual environment in a ComfyUI folder; this process's if there is none."""
    found = (comfyui / name / "bin" / "python" for name in ("venv", ".venv"))
    return str(next(filter(Path.is_file, found), sys.executable))


@dataclass(kw_only=True)
class ComfyServer:
    """One ComfyUI process. Use as a context manager, or call start() and stop().

    `base` is its base directory (models/, input/, output/ ... are made in it), `packs` maps folder
    names in custom_nodes to packs, `env` goes on top of this process's environment. `use_gpu` lets
    ComfyUI use the machine's GPUs; else it runs on the CPU.
    """

    comfyui: Path
    base: Path
    packs: Mapping[str, Path]
    extra_args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    use_gpu: bool = False
    start_timeout_s: float = 120.0
    url: str = field(default="", init=False)
    startup_s: float = field(default=0.0, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _guard: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # ---- process

    @property
    def log_path(self) -> Path:
        return self.base / "comfyui.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until requests are answered.

        Raises: ComfyServerError, with the end of the log, when that takes over start_timeout_s.
        """
        if self._process is not None:
            raise ComfyServerError("already started; stop() first")
        for folder in BASE_FOLDERS:
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        for name, pack in self.packs.items():
            link = self.base / "custom_nodes" / name
            if not link.is_symlink():
                link.symlink_to(pack, target_is_directory=True)
        begin = time.monotonic()
        for attempt in range(1, START_ATTEMPTS + 1):
            self._spawn(_free_port())
            try:
                self._await_ready(begin + self.start_timeout_s)
            except BaseException as failure:
                self.stop(signal.SIGKILL)
                # Between choosing a port and listening on it, another process may take it.
                lost_port = "address already in use" in self.log
                if attempt < START_ATTEMPTS and lost_port and isinstance(failure, ComfyServerError):
                    continue
                raise
            break
        self.startup_s = time.monotonic() - begin

    def stop(self, sig: signal.Signals = signal.SIGINT, timeout_s: float = 20.0) -> int:
        """Send `sig`, kill the server's process group after `timeout_s`; returns its exit status.

        SIGINT lets exit handlers run, SIGKILL is a crash. Stopping twice does nothing.
        """
        process, guard = self._process, self._guard
        self._process = self._guard = None
        if process is None or guard is None:
            return 0
        process.send_signal(sig)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait(timeout_s)
        guard.kill()
        guard.communicate(timeout=timeout_s)
        return status

    def _spawn(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [
            python_of(self.comfyui),
            str(HERE / "stand_ins.py"),
            str(self.comfyui / "main.py"),
            *(() if self.use_gpu else ("--cpu",)),
        ]
        command += ["--listen", "127.0.0.1", "--port", str(port)]
        command += ["--base-directory", str(self.base), "--database-url", "sqlite:///:memory:"]
        command += ["--front-end-root", str(HERE / "stubs_web"), "--disable-auto-launch"]
        command += ["--disable-api-nodes", "--preview-method", "auto", *self.extra_args]
        # A pack that needs the repository on the path would fail for users.
        env = {**os.environ, "PYTHONPATH": "", **self.env}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                interruptible(command),
                cwd=self.comfyui,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _await_ready(self, deadline: float) -> None:
        while True:
            process = self._running()
            with contextlib.suppress(OSError):
                # The base directory tells this server from another that got the port first.
                if str(self.base) in self.get("/system_stats")["system"]["argv"]:
                    return
            if time.monotonic() > deadline:
                raise ComfyServerError(self._report(f"no answer from pid {process.pid} in time"))
            time.sleep(POLL_S)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ComfyServerError("not started")
        if self._process.poll() is not None:
            raise ComfyServerError(self._report(f"ComfyUI ended: {self._process.returncode}"))
        return self._process

    def _report(self, what: str) -> str:
        return f"{what}; the end of {self.log_path}:\n{self.log[-LOG_TAIL_CHARS:]}"

    # ---- requests

    def request(
        self, path: str, *, body: bytes | None = None, content_type: str = "application/json"
    ) -> tuple[int, bytes]:
        """GET, or POST when there is a body; returns the HTTP status and the answer's body."""
        request = urllib.request.Request(
            self.url + path, data=body, headers={"Content-Type": content_type}
        )
        try:
            with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read()

    def get(self, path: str) -> Any:
        """The decoded JSON at `path`. Raises: ComfyServerError unless it answers 200."""
        status, body = self.request(path)
        if status != 200:
            raise ComfyServerError(f"GET {path}: HTTP {status} {body[:500]!r}")
        return json.loads(body)

    def post(self, path: str, content: Mapping[str, Any]) -> Any:
        """Post JSON, return the decoded answer or None if empty.

        Raises: ComfyServerError unless it answers 200.
        """
        status, body = self.request(path, body=json.dumps(content).encode())
        if status != 200:
            raise ComfyServerError(f"POST {path}: HTTP {status} {body[:500]!r}")
        return json.loads(body) if body else None

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Interrupt what runs; with an id, only if that prompt is what runs."""
        self.post("/interrupt", {} if prompt_id is None else {"prompt_id": prompt_id})

    def free(self, *, unload_models: bool = True, free_memory: bool = False) -> None:
        """Ask to unload models, and with free_memory to drop cached outputs, between prompts."""
        self.post("/free", {"unload_models": unload_models, "free_memory": free_memory})

    def upload_image(self, name: str, content: bytes) -> str:
        """Upload an encoded image to input/; returns the name that LoadImage takes."""
        boundary = uuid.uuid4().hex
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n",
            f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="overwrite"\r\n\r\n'
            f"true\r\n--{boundary}--\r\n",
        ]
        status, answer = self.request(
            "/upload/image",
            body=parts[0].encode() + content + parts[1].encode(),
            content_type=f"multipart/form-data; boundary={boundary}",
        )
        if status != 200:
            raise ComfyServerError(f"upload of {name}: HTTP {status} {answer[:500]!r}")
        return str(json.loads(answer)["name"])

    def view(self, file: Mapping[str, str]) -> bytes:
        """The content of a file as outputs name it: filename, subfolder, type."""
        query = urllib.parse.urlencode(
            {key: file[key] for key in ("filename", "subfolder", "type")}
        )
        status, content = self.request(f"/view?{query}")
        if status != 200:
            raise ComfyServerError(f"view of {dict(file)}: HTTP {status}")
        return content

    # ---- prompts

    def run(
        self,
        prompt: Mapping[str, Any],
        *,
        on_event: Callable[[Event], None] | None = None,
        timeout_s: float = 100.0,
    ) -> PromptResult:
        """Queue an API-format prompt and wait for its end; `on_event` sees each event as it comes.

        Raises: PromptRejected; TimeoutError after `timeout_s`, when the prompt is interrupted;
        ComfyServerError when the server dies meanwhile.
        """
        events: list[Event] = []
        work = asyncio.wait_for(self._run(prompt, on_event, events), timeout_s)
        try:
            return asyncio.run(work)
        except asyncio.TimeoutError:  # noqa: UP041 -- not the built-in one on Python 3.10
            with contextlib.suppress(ComfyServerError, OSError):
                self.interrupt()
            last = [event.kind for event in events[-5:]]
            raise TimeoutError(self._report(f"no end in {timeout_s} s, last {last}")) from None
        except aiohttp.ClientError as error:
            raise ComfyServerError(self._report(f"connection lost: {error}")) from error

    async def _run(
        self,
        prompt: Mapping[str, Any],
        on_event: Callable[[Event], None] | None,
        events: list[Event],
    ) -> PromptResult:
        client_id = uuid.uuid4().hex
        begin = time.monotonic()
        async with (
            aiohttp.ClientSession(self.url) as session,
            session.ws_connect(f"/ws?clientId={client_id}", max_msg_size=0) as socket_,
        ):
            features = {"supports_preview_metadata": True}
            await socket_.send_json({"type": "feature_flags", "data": features})
            content = {"prompt": prompt, "client_id": client_id}
            async with session.post("/prompt", json=content) as answer:
                body = await answer.json()
                if answer.status != 200:
                    raise PromptRejected(status=answer.status, body=body)
            prompt_id = str(body["prompt_id"])
            status = None
            while status is None:
                message = await socket_.receive()
                event = _decode(message.type, message.data)
                if event is None:
                    raise ComfyServerError(self._report("the server closed the connection"))
                events.append(event)
                if on_event is not None:
                    on_event(event)
                if event.data.get("prompt_id") == prompt_id:
                    status = FINAL_EVENTS.get(event.kind)
            wall_s = time.monotonic() - begin
            outputs = await _outputs(session, prompt_id)
        return PromptResult(
            prompt_id=prompt_id,
            status=status,
            wall_s=wall_s,
            events=tuple(events),
            outputs=outputs,
        )


async def _outputs(session: aiohttp.ClientSession, prompt_id: str) -> Mapping[str, Any]:
    """What the history says, which it does only some milliseconds after the final event."""
    while True:
        async with session.get(f"/history/{prompt_id}") as answer:
            entry = (await answer.json()).get(prompt_id)
        if entry is not None:
            outputs: Mapping[str, Any] = entry["outputs"]
            return outputs
        await asyncio.sleep(POLL_S)


def _decode(kind: aiohttp.WSMsgType, payload: Any) -> Event | None:
    """The event in a WebSocket message; None when the connection is closed."""
    now = time.monotonic()
    if kind == aiohttp.WSMsgType.TEXT:
        content = json.loads(payload)
        return Event(kind=content["type"], at_s=now, data=content["data"])
    if kind != aiohttp.WSMsgType.BINARY:
        return None
    picture = int.from_bytes(payload[:4], "big")
    if picture == PREVIEW:
        return Event(kind="preview", at_s=now, image=payload[8:])
    if picture == PREVIEW_WITH_METADATA:
        end = 8 + int.from_bytes(payload[4:8], "big")
        metadata = json.loads(payload[8:end])
        return Event(kind="preview", at_s=now, data=metadata, image=payload[end:])
    return Event(kind=f"binary_{picture}", at_s=now, image=payload)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
