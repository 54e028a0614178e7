"""Which worker groups run: found or started by a spec, ended when others need their devices.

Who uses a group leases it, so that a lease for the same devices with another mesh waits its turn instead of ending a
group under a running job.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future

from ..ipc.errors import WorkerStopped
from .client import WorkerGroup
from .launch import StartingGroup, StartInterrupted
from .spec import LaunchSpec
from .waiting import POLL_S, attended, outlast

logger = logging.getLogger(__name__)


class _Entry:
    """A group from the decision to start it until its end. Guarded by the registry's condition."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self.leases = 0
        self.group: Future[WorkerGroup] = Future()
        self.called_off = threading.Event()
        # Someone else waits for the devices: new leases go to a new entry behind that one.
        self.is_retiring = False

    def running(self) -> WorkerGroup | None:
        if self.group.done() and self.group.exception() is None:
            return self.group.result()
        return None

    def is_over(self) -> bool:
        """Whether it holds no devices any more."""
        if not self.group.done():
            return False
        group = self.running()
        return group is None or group.has_ended

    def takes_leases(self) -> bool:
        if self.is_retiring or self.called_off.is_set():
            return False
        group = self.running()
        return not self.group.done() or (group is not None and group.is_alive)


class GroupRegistry:
    """Groups by mesh, devices and runner. Safe from several threads and event loops."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: list[_Entry] = []

    @contextlib.asynccontextmanager
    async def lease(self, spec: LaunchSpec) -> AsyncIterator[WorkerGroup]:
        """The use of a ready group, for an `async with` block; finds it or starts it.

        Entering waits: for the start, and before it for groups on the same devices to become free
        and end. If the coroutine is cancelled, a start that nobody else waits for is called off and
        leaves nothing behind.
        Inside the block, do not lease another group on the same devices: it waits for this one.
        Raises WorkerStartError, or WorkerStopped for a start that is called off by `stop_all`.
        """
        entry = self._join(spec)
        try:
            yield await attended(entry.group)
        except StartInterrupted:
            raise WorkerStopped(
                "the worker group was stopped while it was starting; run the job again"
            ) from None
        finally:
            self._leave(entry)
            # Called off or failed: gone before this returns, unless others wait for it too.
            await outlast(lambda: entry.group.done() or not entry.called_off.is_set())

    def running_groups(self) -> tuple[WorkerGroup, ...]:
        with self._changed:
            groups = [entry.running() for entry in self._entries]
        return tuple(group for group in groups if group is not None and group.is_alive)

    def stop_all(self, *, grace_s: float = 5.0) -> None:
        """End every group and start; wait until nothing is left. Jobs raise WorkerStopped."""
        with self._changed:
            entries = list(self._entries)
            for entry in entries:
                entry.is_retiring = True
                entry.called_off.set()
            self._changed.notify_all()
        groups = [group for entry in entries if (group := _finished_start(entry)) is not None]
        for group in groups:
            group.begin_stop(grace_s=grace_s)
        for group in groups:
            group.stop()
        with self._changed:
            self._drop_ended()

    # ---- entries ----------------------------------------------------------------------------------

    def _join(self, spec: LaunchSpec) -> _Entry:
        """Count one lease more on an entry for `spec`, a new one if need be. Does not wait."""
        with self._changed:
            self._drop_ended()
            for entry in self._entries:
                if entry.spec.key == spec.key and entry.takes_leases():
                    entry.leases += 1
                    return entry
            entry = _Entry(spec)
            entry.leases = 1
            earlier = [
                other
                for other in self._entries
                if other.spec.shares_devices_with(spec) and not other.is_over()
            ]
            for other in earlier:
                other.is_retiring = True
            self._entries.append(entry)
        threading.Thread(
            target=self._start, args=(entry, earlier), name="worker-group-start", daemon=True
        ).start()
        return entry

    def _leave(self, entry: _Entry) -> None:
        with self._changed:
            entry.leases -= 1
            if entry.leases == 0 and not entry.group.done():
                entry.called_off.set()
            self._changed.notify_all()

    def _start(self, entry: _Entry, earlier: list[_Entry]) -> None:
        """Runs in a thread of its own: free the devices, launch, wait."""
        try:
            for other in earlier:
                self._end_when_free(other, entry.called_off)
            group = WorkerGroup(StartingGroup(entry.spec).wait_ready(entry.called_off))
        except BaseException as error:
            with self._changed:
                entry.group.set_exception(error)
                self._changed.notify_all()
            return
        with self._changed:
            if not entry.called_off.is_set():
                entry.group.set_result(group)
                self._changed.notify_all()
                return
        group.stop()
        entry.group.set_exception(StartInterrupted())

    def _end_when_free(self, other: _Entry, called_off: threading.Event) -> None:
        with self._changed:
            while other.leases and not other.is_over():
                if called_off.is_set():
                    raise StartInterrupted
                self._changed.wait(POLL_S)
            if not other.group.done():
                other.called_off.set()
        group = _finished_start(other)
        if group is not None:
            logger.info("ending worker group %s, whose devices are needed", other.spec.degrees)
            group.stop()

    def _drop_ended(self) -> None:
        self._entries = [entry for entry in self._entries if not entry.is_over()]


def _finished_start(entry: _Entry) -> WorkerGroup | None:
    """Wait for the end of a start, which is over soon once it is called off."""
    try:
        return entry.group.result()
    except BaseException:
        return None
