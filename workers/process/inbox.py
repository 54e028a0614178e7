"""The reading side of a rank: sorts what the client says, and ends the process when it goes.

The end of the socket means that ComfyUI is gone. The thread then ends the process at once, even
when the main thread sits in a collective that will never complete, because nobody is left to work
for.

Imports no torch: the thread runs from the rank's first moments on.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable

from comfy_wan_dist.ipc.channel import Channel, ChannelClosed, Received
from comfy_wan_dist.ipc.messages import Cancel, Shutdown


def end_process(reason: str, status: int) -> None:
    """End without cleaning up. No logging: its lock may belong to a thread that is stuck."""
    with contextlib.suppress(OSError):  # a full disk, say
        os.write(2, f"ending: {reason}\n".encode(errors="replace"))
    os._exit(status)


class Inbox:
    """Requests in the order in which they came, and which of them are to stop."""

    def __init__(
        self, channel: Channel, *, on_end: Callable[[str, int], None] = end_process
    ) -> None:
        self._channel = channel
        self._on_end = on_end
        self._queue: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._cancelled: set[str] = set()
        self._is_shutting_down = False
        self._thread = threading.Thread(target=self._read, name="inbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Received:
        """Wait for the next request or Shutdown; its descriptors become the caller's."""
        return self._queue.get()

    def is_cancelled(self, id: str) -> bool:
        with self._lock:
            return self._is_shutting_down or id in self._cancelled

    def finish(self, id: str) -> None:
        """Job `id` is over: a Cancel that comes later means nothing."""
        with self._lock:
            self._open.discard(id)
            self._cancelled.discard(id)

    def _read(self) -> None:
        try:
            while True:
                received = self._channel.receive(None)
                message = received.message
                with self._lock:
                    if isinstance(message, Cancel):
                        self._cancelled |= self._open & {message.id}
                        continue
                    if isinstance(message, Shutdown):
                        self._is_shutting_down = True
                    else:
                        self._open.add(getattr(message, "id", ""))
                self._queue.put(received)
        except ChannelClosed as error:
            self._on_end(str(error), 0)
        except Exception as error:  # without this thread the process would outlive ComfyUI
            self._on_end(f"{type(error).__name__}: {error}", 1)
