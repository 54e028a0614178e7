"""Section "transfer": a job's tensors to one worker and its latent back, on the CPU.

    ours           shared buffers whose descriptors travel over the socket, through the pack's own classes
    pipe           NumPy arrays through a multiprocessing pipe, which pickles
    ray, tensors   torch tensors by ray.put, a reference to an actor, the answer through the object store
    ray, arrays    the same with NumPy arrays, which ray's readers map without a copy

Each way starts with arrays in the sender's own memory and ends when the receiver has read every value; the answer too.
A run sums what it read and the sums are compared, so no way can skip the reading.

Not covered: a job to several ranks, where ours still packs once; other machines.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfy_wan_dist.ipc.channel import ChannelClosed, SocketChannel
from comfy_wan_dist.ipc.messages import Done, ModelSpec, SampleRequest
from comfy_wan_dist.ipc.shared import BufferPool, MapCache, Parcel

from .timing import Comparison, Row, build_row, interleave

SECTION = "transfer"
LATENT = (1, 48, 31, 44, 80)
MASK = (1, 1, 31, 44, 80)
TEXT = (1, 512, 4096)
LIMIT = 0.5
TIMEOUT_S = 60.0
MAP_CACHE_BYTES = 2**30

Array = NDArray[np.float32]
RoundTrip = Callable[[], Array]
"""Send the job and return the answer, read and in any memory."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Float32 arrays of one job: latent and noise, mask, prompt and negative prompt."""

    arrays: tuple[Array, ...]

    @property
    def answer_shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape


def job_payload(
    *,
    latent: Sequence[int] = LATENT,
    mask: Sequence[int] = MASK,
    text: Sequence[int] = TEXT,
) -> Payload:
    """The tensors of a 704x1280 job of 121 frames, or of another size."""
    generator = np.random.default_rng(0)
    shapes = (latent, latent, mask, text, text)
    return Payload(
        arrays=tuple(generator.random(tuple(shape), dtype=np.float32) for shape in shapes)
    )


def measure(
    *,
    budget_s: float,
    report: Callable[[Row], None],
    payload: Payload | None = None,
    others: Sequence[str] | None = None,
) -> None:
    """All rows of the section: ours against `others`, which are all of OTHERS unless given."""
    payload = payload or job_payload()
    size = sum(array.nbytes for array in payload.arrays) / 1e6
    label = f"{size:.0f} MB there, {payload.arrays[0].nbytes / 1e6:.0f} MB back"
    with ExitStack() as stack:
        trips = {"ours": stack.enter_context(our_trip(payload))}
        for other in OTHERS if others is None else others:
            try:
                trips[other] = stack.enter_context(OTHERS[other](payload))
            except ModuleNotFoundError:
                report(_skipped(f"{other}, {label}", "it is not installed: `make bench` does that"))
        comparisons = [
            Comparison(case=f"{other}, {label}", ours="ours", other=other, limit=LIMIT)
            for other in trips
            if other != "ours"
        ]
        things = {name: stopwatch(trip, payload) for name, trip in trips.items()}
        times = interleave(things, comparisons, budget_s=budget_s)
    for comparison in comparisons:
        report(build_row(SECTION, comparison, times))


# ---- what every way does with the arrays


def answer_job(arrays: Sequence[Array], answer: Array) -> None:
    """The worker's part: read all values, and put their sum where the sender will look."""
    answer.flat[0] = sum(float(array.sum()) for array in arrays)


def stopwatch(trip: RoundTrip, payload: Payload) -> Callable[[], float]:
    """Seconds of one trip and of reading its answer. Raises RuntimeError if the worker did not read the job."""
    expected = np.empty(1, dtype=np.float32)
    answer_job(payload.arrays, expected)

    def timed() -> float:
        start = time.perf_counter()
        answer = trip()
        total = float(answer.sum())
        seconds = time.perf_counter() - start
        if answer.flat[0] != expected[0] or not np.isclose(total, float(expected[0]), rtol=1e-3):
            raise RuntimeError(f"the worker read {answer.flat[0]}, the sender sent {expected[0]}")
        return seconds

    return timed


# ---- ours


@contextmanager
def our_trip(payload: Payload) -> Iterator[RoundTrip]:
    """Through a parcel of shared buffers, a socket channel and a rank's map cache."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    process = multiprocessing.get_context("spawn").Process(
        target=_our_worker, args=(theirs, payload.answer_shape), daemon=True
    )
    process.start()
    theirs.close()
    channel = SocketChannel(ours)
    pool = BufferPool()
    tensors = [torch.from_numpy(array) for array in payload.arrays]
    threads = torch.get_num_threads()
    # As in ComfyUI's process, whatever OMP_NUM_THREADS says here; ray copies with several threads too.
    torch.set_num_threads(os.cpu_count() or 1)
    model = ModelSpec(path="", file_bytes=0, mtime_ns=0, dtype="float32", compile=False)

    def trip() -> Array:
        with Parcel(pool) as parcel:
            noisy, clean, mask, cond, uncond = parcel.pack(tensors)
            result = parcel.reserve(payload.answer_shape, torch.float32)
            request = SampleRequest(
                id="job",
                model=model,
                mesh="single",
                solver="euler",
                sigmas=(1.0, 0.0),
                timesteps=(1000.0,),
                start=1.0,
                guidance=5.0,
                noisy=noisy,
                clean=clean,
                mask=mask,
                frame_mask=None,
                cond=cond,
                uncond=uncond,
                step_noise=None,
                result=result,
            )
            channel.send(request, parcel.fds, timeout_s=TIMEOUT_S)
            channel.receive(TIMEOUT_S)
            latent: Array = parcel.tensor(result).numpy()
            return latent

    try:
        yield trip
    finally:
        torch.set_num_threads(threads)
        channel.close()
        pool.close()
        process.join(10)
        process.kill()


def _our_worker(connection: socket.socket, answer_shape: tuple[int, ...]) -> None:
    channel, cache = SocketChannel(connection), MapCache(max_bytes=MAP_CACHE_BYTES)
    own = torch.zeros(answer_shape)
    while True:
        try:
            received = channel.receive(None)
        except ChannelClosed:
            return
        request = received.message
        assert isinstance(request, SampleRequest)
        buffers = cache.adopt(received.fds)
        refs = (request.noisy, request.clean, request.mask, request.cond, request.uncond)
        tensors: list[Tensor] = [buffers[ref.buffer].tensor(ref) for ref in refs if ref is not None]
        answer_job([tensor.numpy() for tensor in tensors], own.numpy())
        buffers[request.result.buffer].tensor(request.result).copy_(own)
        done = Done(id=request.id, rank=0, seconds=0.0, bytes_read=0, ledger=())
        channel.send(done, timeout_s=TIMEOUT_S)


# ---- others


@contextmanager
def pipe_trip(payload: Payload) -> Iterator[RoundTrip]:
    """Through a multiprocessing pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_pipe_worker, args=(theirs, payload.answer_shape), daemon=True)
    process.start()
    theirs.close()

    def trip() -> Array:
        ours.send(payload.arrays)
        answer: Array = ours.recv()
        return answer

    try:
        yield trip
    finally:
        ours.close()
        process.join(10)
        process.kill()


def _pipe_worker(pipe: Connection, answer_shape: tuple[int, ...]) -> None:
    own = np.zeros(answer_shape, dtype=np.float32)
    while True:
        try:
            arrays = pipe.recv()
        except EOFError:
            return
        answer_job(arrays, own)
        pipe.send(own)


@contextmanager
def ray_tensors_trip(payload: Payload) -> Iterator[RoundTrip]:
    """Torch tensors through ray's object store, as a node has them. Raises ModuleNotFoundError without ray."""
    import ray

    tensors = [torch.from_numpy(array) for array in payload.arrays]
    with _ray_worker(payload) as worker:

        def trip() -> Array:
            tensor: Tensor = ray.get(worker.run_on_tensors.remote(ray.put(tensors)))
            answer: Array = tensor.numpy()
            return answer

        yield trip


@contextmanager
def ray_arrays_trip(payload: Payload) -> Iterator[RoundTrip]:
    """NumPy arrays, which ray's readers map without a copy. Raises ModuleNotFoundError without ray."""
    import ray

    with _ray_worker(payload) as worker:

        def trip() -> Array:
            answer: Array = ray.get(worker.run_on_arrays.remote(ray.put(payload.arrays)))
            return answer

        yield trip


@contextmanager
def _ray_worker(payload: Payload) -> Iterator[Any]:
    """An actor of a ray of this process' own."""
    import ray

    class Worker:
        def __init__(self, answer_shape: tuple[int, ...]) -> None:
            self._own = np.zeros(answer_shape, dtype=np.float32)

        def run_on_arrays(self, arrays: Sequence[Array]) -> Array:
            answer_job(arrays, self._own)
            return self._own

        def run_on_tensors(self, tensors: Sequence[Tensor]) -> Tensor:
            answer_job([tensor.numpy() for tensor in tensors], self._own)
            return torch.from_numpy(self._own)

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=2**30,
        ignore_reinit_error=True,
    )
    try:
        yield ray.remote(Worker).remote(payload.answer_shape)
    finally:
        ray.shutdown()


OTHERS: dict[str, Callable[[Payload], AbstractContextManager[RoundTrip]]] = {
    "pipe": pipe_trip,
    "ray, tensors": ray_tensors_trip,
    "ray, arrays": ray_arrays_trip,
}


def _skipped(case: str, reason: str) -> Row:
    return Row(
        section=SECTION,
        case=case,
        ours_s=None,
        other_s=None,
        ratio=None,
        limit=LIMIT,
        ok=None,
        note=f"skipped: {reason}",
    )
