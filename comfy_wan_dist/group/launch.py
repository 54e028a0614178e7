"""Starting a worker group: launch, let the ranks in, wait until all are ready.

    StartingGroup(spec) --wait_ready()--> RunningProcesses --> WorkerGroup (client.py)

Two types, so that nothing can send a job to a group that is not ready. Whoever holds either of them
ends it; nothing of a group outlives a failed or interrupted start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ..ipc.channel import ChannelClosed
from ..ipc.errors import ProtocolError, WorkerStartError
from ..ipc.launch_options import LauncherOptions
from ..ipc.messages import Ready, Shutdown
from .environment import child_environment
from .folder import PrivateFolder
from .listener import Listener, RankConnection
from .machines.door import MachineConnection, MachineDoor, command_to_join
from .process import Lifeline, ProcessHandle
from .spec import LaunchSpec

POLL_S = 0.05
READY_TIMEOUT_S = 1.0
REASON_TIMEOUT_S = 5.0
SHUTDOWN_SEND_S = 1.0
TAIL_LINES, TAIL_BYTES = 60, 16 * 2**10
MAX_LOG_BYTES = 8 * 2**20

logger = logging.getLogger(__name__)


class StartInterrupted(Exception):
    """The start was called off by whoever asked for it."""


class GroupLog:
    """The file that the group's processes write to. It stays; `tail` tells of this start only.

    path: as asked for, or where that cannot be written a new temporary file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > MAX_LOG_BYTES:
                    path.replace(path.with_name(path.name + ".old"))
            self.descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            self.descriptor, name = tempfile.mkstemp(prefix=f"wan-dist-{path.stem}-", suffix=".log")
            self.path = Path(name)
            logger.warning("the log cannot be written (%s); it goes to %s", error, name)
        self._start = os.fstat(self.descriptor).st_size

    def tail(self) -> str:
        """The last lines of this start."""
        try:
            with open(self.path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._start, end - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError as error:
            return f"(the log cannot be read: {error.strerror})"
        return "\n".join(lines)

    def quoted(self) -> str:
        """`tail` as lines to add to an error; nothing if nothing was written."""
        tail = self.tail()
        return f"\nThe end of {self.path}:\n{tail}" if tail else ""

    def close(self) -> None:
        os.close(self.descriptor)


class RunningProcesses:
    """The processes of a group and what is held for them: channels, pidfds, lifeline, folder.

    Of other machines it has only the connections; their ends end what runs there (join.py).
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self.log = GroupLog(spec.log_path)
        self.ranks: dict[int, RankConnection] = {}
        self._resources = contextlib.ExitStack()
        self._resources.callback(self.log.close)
        try:
            self.folder = PrivateFolder()
            self._resources.callback(self.folder.remove)
            self.listener = Listener(self.folder, world_size=spec.ranks_per_machine)
            self._resources.callback(self.listener.close)
            self.door: MachineDoor | None = None
            if spec.machines is not None:
                self.door = MachineDoor(spec, token=self.folder.token)
                self._resources.callback(self.door.close)
            self._lifeline = Lifeline()
            self._resources.callback(self._lifeline.drop)
            disown = weakref.WeakMethod(self._disown)
            os.register_at_fork(after_in_child=lambda: (method := disown()) and method())
            try:
                self._process = self._launch()
            finally:
                self._lifeline.close_reader()
            self.launcher = ProcessHandle(self._process.pid)
            self._resources.callback(self.launcher.close)
        except BaseException:
            self._resources.close()
            raise

    @property
    def machines(self) -> dict[int, MachineConnection]:
        """The other machines that have joined, by number."""
        return {} if self.door is None else self.door.joined

    def close_doors(self) -> None:
        """Let nobody in any more."""
        self.listener.close()
        if self.door is not None:
            self.door.close()

    def end(self, *, grace_s: float = 0.0, settle_s: float = 0.0) -> None:
        """End all processes and free everything, in bounded time. A process that stays is logged.

        grace_s: how long ranks may take after Shutdown, sent only if this is positive.
        settle_s: how long the launcher may take to end by itself after a rank did, so that the log
        is complete.
        """
        if grace_s > 0:
            for connection in self.ranks.values():
                with contextlib.suppress(ChannelClosed, TimeoutError):
                    connection.channel.send(Shutdown(), timeout_s=SHUTDOWN_SEND_S)
            self.launcher.wait(grace_s)
        # The end of its socket ends a rank at once, even in a stuck collective.
        for connection in self.ranks.values():
            connection.channel.close()
        for machine in self.machines.values():
            machine.channel.close()
        self.close_doors()
        self.launcher.wait(settle_s)
        self._lifeline.drop()
        processes = [connection.process for connection in self.ranks.values()]
        handles = [self.launcher, *(process for process in processes if process is not None)]
        for number, patience_s in ((None, 2.0), (signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + patience_s
            for handle in handles:
                if number is not None:
                    handle.send_signal(number)
            if all([handle.wait(deadline - time.monotonic()) for handle in handles]):
                break
        else:
            logger.error(
                "the worker group's processes %s do not end", [handle.pid for handle in handles]
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Reaps. Without pidfds its first thread has ended, and the others need a moment.
            self._process.wait(timeout=1.0)
        for handle in handles[1:]:
            handle.close()
        self._resources.close()

    def _disown(self) -> None:
        """In a child that was forked without an exec: its copies would hide the end of this process from the group."""
        self._lifeline.drop()
        self.close_doors()
        for rank in self.ranks.values():
            rank.channel.drop()
        for machine in self.machines.values():
            machine.channel.drop()

    def _launch(self) -> subprocess.Popen[bytes]:
        spec, door = self.spec, self.door
        options = LauncherOptions(
            folder=self.folder.path,
            device=spec.devices.kind,
            mesh=str(spec.degrees),
            runner=spec.runner,
            lifeline=self._lifeline.reader,
            client=os.getpid(),
            ranks=spec.ranks_per_machine,
            machines=1 if spec.machines is None else spec.machines.count,
            machine=0,
            store=None if door is None else door.store_address,
            store_listener=None if door is None else door.store.fileno(),
        )
        process = start_launcher(
            options,
            python=spec.python,
            pack_root=spec.pack_root,
            environment=child_environment(
                os.environ,
                devices=spec.used_devices,
                pack_root=spec.pack_root,
                interface=None if door is None else door.interface,
            ),
            output=self.log.descriptor,
        )
        if door is not None:
            door.close_store()
        return process


def start_launcher(
    options: LauncherOptions,
    *,
    python: str,
    pack_root: Path,
    environment: Mapping[str, str],
    output: int,
) -> subprocess.Popen[bytes]:
    """Run workers/process/launcher.py; it inherits the descriptors of `options`. All write to `output`."""
    listener = options.store_listener
    return subprocess.Popen(
        [python, "-m", "workers.process.launcher", *options.argv()],
        cwd=pack_root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[options.lifeline, *([] if listener is None else [listener])],
        # Ctrl-C in the terminal is for whoever started this, who then ends the group.
        start_new_session=True,
    )


class StartingGroup:
    """A group whose processes have been launched and are not ready yet."""

    def __init__(self, spec: LaunchSpec) -> None:
        """Raises WorkerStartError if the launcher cannot be run at all."""
        if sys.platform != "linux":
            raise WorkerStartError(
                f"worker groups run on Linux only; this is {sys.platform}. "
                "Use Linux, or a Linux container or WSL"
            )
        self._deadline = time.monotonic() + spec.start_timeout_s
        try:
            self._processes = RunningProcesses(spec)
        except OSError as error:
            raise WorkerStartError(f"the worker group could not be launched: {error}") from error

    def wait_ready(self, called_off: threading.Event) -> RunningProcesses:
        """Wait until every rank is ready.

        Raises WorkerStartError if a process ends or the deadline passes, and StartInterrupted once
        `called_off` is set; then nothing of the group is left.
        """
        ready: set[int] = set()
        processes = self._processes
        if processes.spec.machines is not None:
            logger.info(
                "waiting for %d other machine(s); on each run: %s",
                processes.spec.machines.count - 1,
                command_to_join(processes.spec.machines.head),
            )
        try:
            while len(ready) < processes.spec.world_size:
                if called_off.is_set():
                    raise StartInterrupted
                if time.monotonic() > self._deadline:
                    raise WorkerStartError(
                        "the worker group was not ready within "
                        f"{processes.spec.start_timeout_s:g} s; {self._what_is_missing(ready)}"
                    )
                self._step(ready)
        except WorkerStartError as error:
            processes.end(settle_s=3.0)
            raise WorkerStartError(f"{error}{processes.log.quoted()}") from error.__cause__
        except BaseException:
            processes.end()
            raise
        processes.close_doors()
        pids = {
            rank: f"{connection.pid}{connection.place}"
            for rank, connection in sorted(processes.ranks.items())
        }
        logger.info(
            "worker group %s on %s is ready: launcher %d, ranks %s",
            processes.spec.degrees,
            processes.spec.used_devices,
            processes.launcher.pid,
            pids,
        )
        return processes

    def _step(self, ready: set[int]) -> None:
        """Wait a moment for one thing to happen, and deal with it."""
        processes = self._processes
        poll = select.poll()
        poll.register(processes.launcher, select.POLLIN)
        doors: dict[int, Callable[[], RankConnection | None]] = {
            processes.listener.fileno(): partial(
                processes.listener.accept, launcher_pid=processes.launcher.pid
            )
        }
        if processes.door is not None:
            doors[processes.door.fileno()] = processes.door.accept
        waiting = {
            connection.channel.fileno(): connection for connection in processes.ranks.values()
        }
        joined = {machine.channel.fileno(): machine for machine in processes.machines.values()}
        for descriptor in (*doors, *waiting, *joined):
            poll.register(descriptor, select.POLLIN)
        # What machines say before that their ranks ended: it tells why.
        events = [descriptor for descriptor, _ in poll.poll(POLL_S * 1000)]
        for descriptor in sorted(events, key=lambda descriptor: descriptor not in joined):
            if descriptor in joined:
                raise WorkerStartError(str(joined[descriptor].last_word()))
            if descriptor in doors:
                connection = doors[descriptor]()
                if connection is not None:
                    self._admit(connection)
            elif descriptor == processes.launcher.fileno():
                raise WorkerStartError(
                    "the worker group's launcher ended before its ranks were ready"
                )
            elif descriptor in waiting:
                ready.add(self._hear_ready(waiting[descriptor]))

    def _admit(self, connection: RankConnection) -> None:
        if connection.rank in self._processes.ranks:
            connection.close()
            raise WorkerStartError(f"rank {connection.rank} reported twice")
        self._processes.ranks[connection.rank] = connection

    def _what_is_missing(self, ready: set[int]) -> str:
        processes = self._processes
        machines = processes.spec.machines
        if machines is not None and processes.door is not None and processes.door.missing:
            return (
                f"{len(processes.machines)} of {machines.count - 1} other machines joined: run "
                f"`{command_to_join(machines.head)}` there, in the folder of the pack"
            )
        missing = sorted(set(range(processes.spec.world_size)) - ready)
        return f"rank {', '.join(map(str, missing))} did not report"

    def _hear_ready(self, connection: RankConnection) -> int:
        rank = connection.rank
        try:
            message = connection.channel.receive(READY_TIMEOUT_S).message
        except (ChannelClosed, ProtocolError, TimeoutError) as error:
            self._hear_reason(connection.machine)
            raise WorkerStartError(
                f"rank {rank}{connection.place} ended before it was ready: {error}"
            ) from error
        if not isinstance(message, Ready) or message.rank != rank:
            raise WorkerStartError(f"rank {rank} said {type(message).__name__} instead of Ready")
        return rank

    def _hear_reason(self, machine: int) -> None:
        """Raise what another machine says, soon, of the end of its ranks."""
        connection = self._processes.machines.get(machine)
        if connection is not None and connection.channel.has_word_within(REASON_TIMEOUT_S):
            raise WorkerStartError(str(connection.last_word()))
