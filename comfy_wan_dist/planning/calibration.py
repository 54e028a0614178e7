"""Measure what a CPU rank reaches, for plans of `cpu:N`; well under a second.

The arithmetic is timed on one thread and shared out over the ranks where they outnumber the cores. The link is a pair
of local sockets, as gloo uses them. Not covered: ranks that slow each other down in caches and memory.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import torch

from ..mesh.shape import HEAD_DIM
from .hardware import Calibration

WIDTH = 1024
TOKENS = 512
COPY_BYTES = 32 * 2**20
MESSAGE_BYTES = 16 * 2**20
SMALL_MESSAGES = 200


def measure_cpu(ranks: int) -> Calibration:
    """What each of `ranks` reaches while all of them work."""
    share = min(1.0, (os.cpu_count() or 1) / ranks)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rate, memory = _arithmetic_rate(), _copy_rate()
    finally:
        torch.set_num_threads(threads)
    link, latency = _socket_pair()
    return Calibration(
        rate=rate * share, memory=memory * share, link=link * share, latency=latency / share
    )


def _best_seconds(work: Callable[[], object], times: int = 3) -> float:
    work()
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _arithmetic_rate() -> float:
    """FLOP/s of a matrix product and an attention together, float32."""
    x, weight = torch.ones(TOKENS, WIDTH), torch.ones(WIDTH, WIDTH)
    heads = torch.ones(1, WIDTH // HEAD_DIM, TOKENS, HEAD_DIM)

    def work() -> None:
        torch.nn.functional.linear(x, weight)
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)

    flops = 2 * TOKENS * WIDTH * WIDTH + 4 * TOKENS * TOKENS * WIDTH
    with torch.inference_mode():
        return flops / _best_seconds(work)


def _copy_rate() -> float:
    """Bytes read and written per second."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _best_seconds(lambda: target.copy_(source))


def _socket_pair() -> tuple[float, float]:
    """Bytes per second one way, and seconds there and back, between two threads."""
    near, far = socket.socketpair()
    with near, far:
        far_done = threading.Thread(target=_answer, args=(far,), daemon=True)
        far_done.start()
        start = time.perf_counter()
        near.sendall(bytes(MESSAGE_BYTES))
        near.recv(1)
        link = MESSAGE_BYTES / (time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(SMALL_MESSAGES):
            near.sendall(b"x")
            near.recv(1)
        latency = (time.perf_counter() - start) / SMALL_MESSAGES
        near.shutdown(socket.SHUT_WR)
        far_done.join()
    return link, latency


def _answer(far: socket.socket) -> None:
    """Acknowledge one large message, then send small ones back until the other side is done."""
    left = MESSAGE_BYTES
    while left:
        left -= len(far.recv(min(left, 2**20)))
    far.sendall(b"x")
    while data := far.recv(1):
        far.sendall(data)
