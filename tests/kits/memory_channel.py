"""A channel without a socket: the same contract between two threads."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from comfy_wan_dist.ipc.channel import ChannelClosed, Received
from comfy_wan_dist.ipc.messages import Message, decode, encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    body: bytes
    fds: tuple[int, ...]


class MemoryChannel:
    """One end of a `memory_pair`."""

    def __init__(
        self,
        inbox: queue.SimpleQueue[Packet | None],
        outbox: queue.SimpleQueue[Packet | None],
        closed: threading.Event,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._closed = closed

    def send(self, message: Message, fds: Sequence[int] = (), *, timeout_s: float) -> None:
        if self._closed.is_set():
            raise ChannelClosed("the pair is closed")
        self._outbox.put(Packet(body=encode(message), fds=tuple(os.dup(fd) for fd in fds)))

    def receive(self, timeout_s: float | None) -> Received:
        try:
            packet = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError("no message came") from None
        if packet is None:
            self._inbox.put(None)  # for the next call
            raise ChannelClosed("the pair is closed")
        return Received(message=decode(packet.body), fds=packet.fds)

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while (packet := self._inbox.get_nowait()) is not None:
                for fd in packet.fds:
                    os.close(fd)
        self._inbox.put(None)
        self._outbox.put(None)


def memory_pair() -> tuple[MemoryChannel, MemoryChannel]:
    """Two connected in-memory ends."""
    one: queue.SimpleQueue[Packet | None] = queue.SimpleQueue()
    other: queue.SimpleQueue[Packet | None] = queue.SimpleQueue()
    closed = threading.Event()
    return MemoryChannel(one, other, closed), MemoryChannel(other, one, closed)
