"""Channels that carry messages and file descriptors between ComfyUI's process and one rank.

    frame = u32 length, little-endian | JSON of one message (messages.py); descriptors ride on the
    first byte

Covered: partial reads and writes, deadlines in both directions, a limit on frames, refusal of
descriptors that do not belong, and no leaked descriptor on any path. Between machines the same
frames go over TCP, without descriptors. Not covered: encryption, and trust: who may connect is
checked where connections are accepted (group/listener.py, machines/door.py).
Imports no torch: a rank says hello before it does.

One thread may send while another receives; two senders (or receivers) at once need their own lock.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ProtocolError, WanDistError
from .messages import MAX_MESSAGE_BYTES, Message, decode, encode

MAX_FDS = 16
"""Descriptors per frame; Linux itself allows 253."""

_LENGTH = struct.Struct("<I")
_INT_BYTES = array.array("i").itemsize
_RECEIVE_BYTES = 64 * 2**10


class ChannelClosed(WanDistError):
    """The other side has gone. Each side turns this into what it means there."""


class ChannelCut(ChannelClosed):
    """The connection is lost, and nobody has closed it: the other machine or the network is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A message with the descriptors that came with it; they are the receiver's to close."""

    message: Message
    fds: tuple[int, ...] = ()


class SocketChannel:
    """One end of a two-way stream of messages over a connected socket, which it owns; descriptors need AF_UNIX."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        # Of the frame being received; kept over a time-out.
        self._data = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """To wait until a message may be there."""
        return self._socket.fileno()

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the other side is gone, by then; what it said before can still be received."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def has_word_within(self, timeout_s: float) -> bool:
        """Whether `receive` would not just wait, by then."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def send(self, message: Message, fds: Sequence[int] = (), *, timeout_s: float) -> None:
        """Send a message; `fds` stay the caller's.

        Raises ChannelClosed, or TimeoutError if the other side does not read; the channel is of no
        use after either.
        """
        body = encode(message)
        if len(body) > MAX_MESSAGE_BYTES or len(fds) > MAX_FDS:
            raise ProtocolError(
                f"a message of {len(body)} bytes with {len(fds)} descriptors is too large; "
                f"{MAX_MESSAGE_BYTES} bytes and {MAX_FDS} descriptors may travel"
            )
        deadline = time.monotonic() + timeout_s
        left = memoryview(_LENGTH.pack(len(body)) + body)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while left:
            try:
                sent = self._socket.sendmsg([left], control, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, "the other side does not read")
            except OSError as error:
                raise _gone(error) from error
            else:
                left = left[sent:]
                control = []

    def receive(self, timeout_s: float | None) -> Received:
        """The next message; None waits for ever.

        Raises TimeoutError (the channel stays usable), ChannelClosed at the end, or ProtocolError,
        after which the channel is of no use.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while (length := self._frame_length()) is None or len(self._data) < length:
                self._fill(length or _LENGTH.size, deadline)
            message = decode(bytes(self._data[_LENGTH.size :]))
        except ProtocolError:
            self._drop_fds()
            raise
        self._data.clear()
        fds, self._fds = tuple(self._fds), []
        return Received(message=message, fds=fds)

    def close(self) -> None:
        """End both directions, waking a receiver on either side. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._drop_fds()

    def drop(self) -> None:
        """Close this process's copy alone: the connection lives on in one that forked, or was forked."""
        self._socket.close()

    def _frame_length(self) -> int | None:
        """Bytes of the whole frame once its head is there."""
        if len(self._data) < _LENGTH.size:
            return None
        (body,) = _LENGTH.unpack_from(self._data)
        if body > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a frame of {body} bytes was announced; at most {MAX_MESSAGE_BYTES} may travel"
            )
        return _LENGTH.size + int(body)

    def _fill(self, frame_bytes: int, deadline: float | None) -> None:
        """Read some bytes of this frame, never beyond: the next one's descriptors come with it."""
        wanted = min(frame_bytes - len(self._data), _RECEIVE_BYTES)
        space = socket.CMSG_SPACE((MAX_FDS + 1) * _INT_BYTES)
        while True:
            try:
                data, controls, flags, _ = self._socket.recvmsg(
                    wanted, space, socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, "no message came")
            except OSError as error:
                self._drop_fds()
                raise _gone(error) from error
        at_start = not self._data
        arrived = 0
        for level, kind, payload in controls:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % _INT_BYTES])
                self._fds.extend(numbers)
                arrived += len(numbers)
        if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
            raise ProtocolError(f"a frame carries more than {MAX_FDS} descriptors")
        if arrived and not at_start:
            raise ProtocolError(
                "descriptors came in the middle of a frame; they belong on its first byte"
            )
        if not data:
            cut = bool(self._data)
            self._drop_fds()
            raise ChannelClosed(
                "the other side has gone" + (" in the middle of a message" if cut else "")
            )
        self._data += data

    def _wait(self, event: int, deadline: float | None, complaint: str) -> None:
        poll = select.poll()
        try:
            poll.register(self._socket, event)
        except (OSError, ValueError) as error:  # closed by another thread
            raise ChannelClosed("this side has closed the channel") from error
        timeout_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(timeout_ms) and deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(complaint)

    def _drop_fds(self) -> None:
        # Two threads may be here at once: pop hands out each descriptor once.
        with contextlib.suppress(IndexError):
            while True:
                os.close(self._fds.pop())


def _gone(error: OSError) -> ChannelClosed:
    closed = error.errno in (errno.ECONNRESET, errno.EPIPE, errno.EBADF)
    kind = ChannelClosed if closed else ChannelCut
    return kind(f"the other side has gone: {error}")
