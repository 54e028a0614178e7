"""Another machine's side of a group: `python -m comfy_wan_dist worker --join HOST:PORT`.

It waits until the head starts a group, starts its share of it as the head does, and ends that share when the
connection ends; then it waits for the next group. The head's side is in door.py.

The processes end with this one, however it ends (the lifeline of workers/process/launcher.py), and their output
goes to its standard error. It runs what the head asks for: only join a head that you trust.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ...ipc.channel import ChannelClosed, SocketChannel
from ...ipc.errors import ConfigError, ProtocolError
from ...ipc.launch_options import LauncherOptions
from ...ipc.machine_messages import Arrive, Join, Refuse
from ...ipc.tcp import Address, connect, interface_of
from ...mesh.devices import DeviceList, parse_devices
from ..environment import child_environment
from ..folder import PrivateFolder
from ..launch import start_launcher
from ..process import Lifeline, ProcessHandle
from ..spec import PACK_ROOT

CONNECT_TIMEOUT_S = 5.0
PAUSE_S = 0.5
JOIN_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 5.0
END_TIMEOUT_S = 5.0
TAIL_LINES = 40

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What this machine gives. devices: as the loader's widget. models: where files are looked for by name."""

    head: Address
    devices: str
    visible_cuda: int
    models: Path | None


class Announcer:
    """Says things on standard error, and the same thing once."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> None:
        if text != self._last:
            self._last = text
            sys.stderr.write(f"[wan-dist] {text}\n")
            sys.stderr.flush()


def serve(offer: Offer, say: Say) -> None:
    """Take part in one group after the other, until KeyboardInterrupt."""
    while True:
        connection = _reach(offer.head, say)
        ip = str(connection.getsockname()[0])
        # A name may have several addresses: all go on with the one that answered.
        host, port = connection.getpeername()[:2]
        reached = replace(offer, head=Address(host=host, port=port))
        channel = SocketChannel(connection)
        try:
            _take_part(reached, channel, ip=ip, say=say)
        except (ChannelClosed, ProtocolError, TimeoutError) as error:
            say(f"the group is over: {error}")
        finally:
            channel.close()
        time.sleep(PAUSE_S)


def _reach(head: Address, say: Say) -> socket.socket:
    """Connect, as soon as the head starts a group."""
    while True:
        try:
            return connect(head, timeout_s=CONNECT_TIMEOUT_S)
        except OSError as error:
            say(f"waiting for a group to start at {head} ({error.strerror or error})")
            time.sleep(PAUSE_S)


def _take_part(offer: Offer, channel: SocketChannel, *, ip: str, say: Say) -> None:
    channel.send(Arrive(name=socket.gethostname()), timeout_s=SEND_TIMEOUT_S)
    message = channel.receive(JOIN_TIMEOUT_S).message
    if isinstance(message, Refuse):
        say(f"the head refuses: {message.reason}")
        return
    if not isinstance(message, Join):
        raise ProtocolError(f"the head said {type(message).__name__} instead of Join")
    try:
        devices = choose_devices(message, offer)
        share = Share(message, offer, devices=devices, interface=interface_of(ip))
    except (
        ConfigError,
        OSError,
        ValueError,
    ) as error:  # the last: text that no process can be given
        say(str(error))
        channel.send(Refuse(reason=str(error)), timeout_s=SEND_TIMEOUT_S)
        return
    with share:
        say(f"joined as number {message.machine} of {message.machines} with {devices}")
        reason = share.watch(channel)
    say(reason)


def choose_devices(join: Join, offer: Offer) -> DeviceList:
    """The first devices of this machine's choice. Raises ConfigError if they are too few or of another kind."""
    if join.device == "cpu" and offer.devices.strip().lower() in ("all", ""):
        return DeviceList(kind="cpu", indices=tuple(range(join.ranks)))
    have = parse_devices(offer.devices, visible_cuda=offer.visible_cuda)
    if have.kind != join.device or have.count < join.ranks:
        raise ConfigError(
            f"the group needs {join.ranks} {join.device} devices on each machine; this one gives {have.count} "
            f"{have.kind} ({have}), and different numbers are not supported: change --devices there, or devices and "
            "mesh in the loader"
        )
    return have.take(join.ranks)


class Share:
    """This machine's processes of a group: launcher, ranks, folder. Use as a context manager."""

    def __init__(self, join: Join, offer: Offer, *, devices: DeviceList, interface: str) -> None:
        self._resources = contextlib.ExitStack()
        try:
            folder = PrivateFolder(token=join.token)
            self._resources.callback(folder.remove)
            self._lifeline = Lifeline()
            self._resources.callback(self._lifeline.drop)
            self._output = Output()
            try:
                self._process = start_launcher(
                    self._options(join, offer, folder.path),
                    python=sys.executable,
                    pack_root=PACK_ROOT,
                    environment=child_environment(
                        os.environ, devices=devices, pack_root=PACK_ROOT, interface=interface
                    ),
                    output=self._output.descriptor,
                )
            finally:
                self._lifeline.close_reader()
                self._output.start()
            self._launcher = ProcessHandle(self._process.pid)
            self._resources.callback(self._launcher.close)
        except BaseException:
            self._resources.close()
            raise

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes; the folder goes too."""
        self._lifeline.drop()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)
        finally:
            self._resources.close()
            self._output.finish()

    def watch(self, channel: SocketChannel) -> str:
        """Wait until the head or the processes here end the share; says why. Tells the head of the latter."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        poll.register(self._launcher, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll()}
        if channel.fileno() in ended:
            try:
                said = type(channel.receive(0).message).__name__
            except (ChannelClosed, ProtocolError, TimeoutError) as error:
                return f"the group is over: {error}"
            return f"the group is over: the head said {said} out of turn"
        status = self._process.wait()
        self._output.finish()
        reason = f"its processes ended with status {status}"
        if status:
            reason += f"; their last lines:\n{self._output.tail()}"
        with contextlib.suppress(ChannelClosed, TimeoutError):
            channel.send(Refuse(reason=reason), timeout_s=SEND_TIMEOUT_S)
        return f"the group is over: the processes here ended with status {status}"

    def _options(self, join: Join, offer: Offer, folder: Path) -> LauncherOptions:
        return LauncherOptions(
            folder=folder,
            device=join.device,
            mesh=join.mesh,
            runner=join.runner,
            lifeline=self._lifeline.reader,
            client=os.getpid(),
            ranks=join.ranks,
            machines=join.machines,
            machine=join.machine,
            store=Address(host=offer.head.host, port=join.store_port),
            report=offer.head,
            models=offer.models,
        )


class Output:
    """A pipe whose lines go to standard error, and of which the last are kept."""

    def __init__(self) -> None:
        self._reader, self.descriptor = os.pipe()
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)

    def start(self) -> None:
        """Read on, until whoever has inherited the descriptor is gone."""
        os.close(self.descriptor)
        self._thread.start()

    def finish(self) -> None:
        """Wait for what has been written; a stray process may hold the pipe open."""
        self._thread.join(1.0)

    def tail(self) -> str:
        return "\n".join(self._lines) or "(they wrote nothing)"

    def _copy(self) -> None:
        with open(self._reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                sys.stderr.write(line)
                sys.stderr.flush()
