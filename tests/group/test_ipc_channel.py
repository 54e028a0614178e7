"""Frames, descriptors and deadlines of channels."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comfy_wan_dist.ipc import channel as channel_module
from comfy_wan_dist.ipc.channel import MAX_FDS, ChannelClosed, SocketChannel
from comfy_wan_dist.ipc.errors import ConfigError, ProtocolError
from comfy_wan_dist.ipc.messages import (
    KINDS,
    PROTOCOL_VERSION,
    Cancel,
    DecodeRequest,
    Done,
    Failed,
    Ready,
    TensorRef,
    VAESpec,
    decode,
    encode,
)

CANCEL = Cancel(id="job-1")


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def raw_and_channel() -> Iterator[tuple[socket.socket, SocketChannel]]:
    """The bare socket of a misbehaving peer, and the channel that reads from it."""
    raw, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = SocketChannel(connection)
    yield raw, channel
    raw.close()
    channel.close()


@pytest.fixture
def pair() -> Iterator[tuple[SocketChannel, SocketChannel]]:
    one, other = map(SocketChannel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_channel_carries_messages_both_ways_in_order(
    pair: tuple[SocketChannel, SocketChannel],
) -> None:
    one, other = pair
    request = DecodeRequest(
        id="\u00e4 \U0001f600",
        vae=VAESpec(path="/p", file_bytes=2**40, mtime_ns=-1, dtype="float32"),
        latent=TensorRef(buffer=0, offset=0, dtype="float32", shape=()),
        result=TensorRef(buffer=1, offset=64, dtype="float32", shape=(1, 0, 3)),
    )
    one.send(request, timeout_s=1)
    one.send(CANCEL, timeout_s=1)
    other.send(Ready(rank=1, device="cpu"), timeout_s=1)
    assert other.receive(1).message == request
    assert other.receive(1).message == CANCEL
    assert one.receive(1).message == Ready(rank=1, device="cpu")


def test_channel_carries_descriptors_with_their_own_message(
    pair: tuple[SocketChannel, SocketChannel], pipe: tuple[int, int]
) -> None:
    one, other = pair
    reading, writing = pipe
    one.send(CANCEL, timeout_s=1)
    one.send(CANCEL, (writing, writing), timeout_s=1)
    one.send(CANCEL, timeout_s=1)
    assert other.receive(1).fds == ()
    fds = other.receive(1).fds
    assert other.receive(1).fds == ()
    assert len(fds) == 2
    assert all(not os.get_inheritable(fd) for fd in fds)
    os.write(fds[1], b"x")
    assert os.read(reading, 1) == b"x"
    for fd in fds:
        os.close(fd)


def test_channel_raises_timeout_and_stays_usable(pair: tuple[SocketChannel, SocketChannel]) -> None:
    one, other = pair
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        other.receive(0.05)
    assert time.monotonic() - started < 1
    one.send(CANCEL, timeout_s=1)
    assert other.receive(1).message == CANCEL


def test_channel_raises_closed_on_both_sides(pair: tuple[SocketChannel, SocketChannel]) -> None:
    one, other = pair
    one.close()
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            other.receive(1)
    with pytest.raises(ChannelClosed):
        other.send(CANCEL, timeout_s=1)
    with pytest.raises(ChannelClosed):
        one.send(CANCEL, timeout_s=1)


def test_channel_close_wakes_a_receiver(pair: tuple[SocketChannel, SocketChannel]) -> None:
    one, _ = pair
    closer = threading.Timer(0.05, one.close)
    closer.start()
    with pytest.raises(ChannelClosed):
        one.receive(None)
    closer.join()


def test_closed_pair_frees_descriptors_that_nobody_received(
    pair: tuple[SocketChannel, SocketChannel], pipe: tuple[int, int]
) -> None:
    one, other = pair
    reading, writing = pipe
    one.send(CANCEL, (writing,), timeout_s=1)
    os.close(writing)
    one.close()
    other.close()
    assert os.read(reading, 1) == b""


def test_receive_joins_single_bytes(raw_and_channel: tuple[socket.socket, SocketChannel]) -> None:
    raw, channel = raw_and_channel
    for byte in frame(encode(CANCEL)):
        with pytest.raises(TimeoutError):
            channel.receive(0)
        raw.send(bytes([byte]))
    assert channel.receive(0).message == CANCEL


def test_send_and_receive_a_frame_larger_than_the_socket_holds() -> None:
    one, other = map(SocketChannel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    message = Failed(id="x", rank=0, error="E", message="m" * 2_000_000, traceback="", fatal=False)
    sender = threading.Thread(target=one.send, args=(message,), kwargs={"timeout_s": 10})
    sender.start()
    assert other.receive(10).message == message
    sender.join()
    one.close()
    other.close()


def test_send_has_a_deadline_when_the_peer_does_not_read() -> None:
    one, other = map(SocketChannel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    message = Failed(id="x", rank=0, error="E", message="m" * 500_000, traceback="", fatal=False)
    started = time.monotonic()

    def send_on() -> None:
        for _ in range(100):
            one.send(message, timeout_s=0.1)

    with pytest.raises(TimeoutError):
        send_on()
    assert time.monotonic() - started < 5
    one.close()
    other.close()


def test_receive_refuses_an_announced_giant_before_reading_it(
    raw_and_channel: tuple[socket.socket, SocketChannel],
) -> None:
    raw, channel = raw_and_channel
    raw.send(struct.pack("<I", 2**32 - 1))
    with pytest.raises(ProtocolError, match="at most"):
        channel.receive(1)


def test_send_refuses_what_the_other_side_would(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = SocketChannel(left)
    with pytest.raises(ProtocolError):
        channel.send(CANCEL, (0,) * (MAX_FDS + 1), timeout_s=1)
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(ProtocolError):
        channel.send(CANCEL, timeout_s=1)
    channel.close()
    right.close()


@pytest.mark.parametrize("count", [MAX_FDS + 1, 100])
def test_receive_refuses_too_many_descriptors_and_leaks_none(
    raw_and_channel: tuple[socket.socket, SocketChannel], pipe: tuple[int, int], count: int
) -> None:
    raw, channel = raw_and_channel
    before = open_fds()
    socket.send_fds(raw, [frame(encode(CANCEL))], [pipe[0]] * count)
    with pytest.raises(ProtocolError, match="descriptors"):
        channel.receive(1)
    assert open_fds() == before


def test_receive_refuses_descriptors_in_the_middle_of_a_frame(
    raw_and_channel: tuple[socket.socket, SocketChannel], pipe: tuple[int, int]
) -> None:
    raw, channel = raw_and_channel
    before = open_fds()
    data = frame(encode(CANCEL))
    raw.send(data[:10])
    socket.send_fds(raw, [data[10:]], [pipe[0]])
    with pytest.raises(ProtocolError, match="middle"):
        channel.receive(1)
    assert open_fds() == before


@pytest.mark.parametrize("cut", [1, 4, 20])
def test_receive_leaks_no_descriptor_when_the_peer_ends_in_a_frame(
    raw_and_channel: tuple[socket.socket, SocketChannel], pipe: tuple[int, int], cut: int
) -> None:
    raw, channel = raw_and_channel
    before = open_fds()
    socket.send_fds(raw, [frame(encode(CANCEL))[:cut]], [pipe[0]])
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelClosed, match="middle"):
        channel.receive(1)
    assert open_fds() == before


def test_receive_leaks_no_descriptor_with_a_wrong_message(
    raw_and_channel: tuple[socket.socket, SocketChannel], pipe: tuple[int, int]
) -> None:
    raw, channel = raw_and_channel
    before = open_fds()
    socket.send_fds(
        raw, [frame(b'{"version":%d,"kind":"Eval","body":{}}' % PROTOCOL_VERSION)], [pipe[0]]
    )
    with pytest.raises(ProtocolError, match="unknown kind"):
        channel.receive(1)
    assert open_fds() == before


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    chunks=st.lists(st.binary(max_size=40), max_size=6),
    fd_counts=st.lists(st.integers(0, MAX_FDS + 4), min_size=6, max_size=6),
    framed=st.booleans(),
)
def test_receive_survives_any_bytes_and_leaks_nothing(
    chunks: list[bytes], fd_counts: list[int], framed: bool
) -> None:
    raw, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    null = os.open(os.devnull, os.O_RDONLY)
    before = open_fds() - 1  # the socket of the channel goes, too
    channel = SocketChannel(connection)
    for chunk, count in zip(chunks, fd_counts, strict=False):
        data = frame(chunk) if framed else chunk
        if data:
            socket.send_fds(raw, [data], [null] * count)
    raw.shutdown(socket.SHUT_WR)

    def receive_all() -> None:
        while True:
            for fd in channel.receive(1).fds:
                os.close(fd)

    with pytest.raises((ProtocolError, ChannelClosed)):
        receive_all()
    channel.close()
    assert open_fds() == before
    raw.close()
    os.close(null)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(
    kind=st.sampled_from(sorted(KINDS)) | st.text(max_size=8),
    body=JSON,
    version=st.just(PROTOCOL_VERSION) | JSON,
)
def test_decode_raises_only_protocol_errors(kind: str, body: object, version: object) -> None:
    data = json.dumps({"version": version, "kind": kind, "body": body}).encode()
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert type(message).__name__ == kind


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_decode_refuses_a_message_with_one_field_changed(data: st.DataObject) -> None:
    failed = Failed(id="x", rank=0, error="E", message="m", traceback="t", fatal=False)
    envelope = json.loads(encode(failed))
    field = data.draw(st.sampled_from(sorted(envelope["body"])))
    value = data.draw(JSON)
    if type(value) is type(envelope["body"][field]):
        return
    envelope["body"][field] = value
    with pytest.raises(ProtocolError):
        decode(json.dumps(envelope).encode())


def test_number_that_json_has_not_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match="not finite"):
        encode(Done(id="a", rank=0, seconds=float("nan"), bytes_read=0, ledger=()))
