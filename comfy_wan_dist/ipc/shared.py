"""Tensors in anonymous shared memory that travel as file descriptors.

    client                                             rank
    BufferPool.take -> SharedBuffer  --- memfd --->    MapCache.adopt -> SharedBuffer
      .tensor(ref): view on its mapping                  .tensor(ref): view on its own mapping

A buffer has no name, so there is nothing to guess and nothing left behind after SIGKILL. It is
sealed against shrinking and growing, so that no side can pull pages from under the other (SIGBUS).

Who frees: a mapping is never closed by hand, because a tensor over a closed mapping is a
segmentation fault; it goes when its last view goes. The descriptor is closed by its owner: the pool
here, `MapCache` after mapping there. A buffer whose tensors leave for ComfyUI, which caches them,
goes back to the pool with its mapping when the last of them dies.

Fresh pages are what costs: filling 21 MB takes 8.6 ms in a new buffer and 2.5 ms in a used one
(measured on one core), hence the pool and the cache of mappings. Populating a mapping in advance
gained nothing in the same test.

Not covered: machines other than this one; pinned memory.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .errors import ProtocolError
from .messages import TensorRef

ALIGNMENT = 64
MAX_BUFFER_BYTES = 2**40
MAX_DIMS = 8

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "uint8", "int32", "int64")
}
"""What may travel. No bool: a byte other than 0 and 1 in one is undefined behaviour."""

# linux/fcntl.h; the fcntl module lacks some of them in some builds.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK | F_SEAL_GROW

_DEFAULT_IDLE_BYTES = 512 * 2**20
_SIZE_STEP = 2**20


class SharedBuffer:
    """One mapping of one shared buffer. Tensors made from it outlive the object."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        # What tensors hold: it dies with the last of them, while the mapping can be used again.
        self._memory = memoryview(mapping)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self._memory)

    def when_unused(self, call: Callable[..., None], *arguments: Any) -> None:
        """Have `call` called with a SharedBuffer of the same memory and `arguments` once this and its tensors are gone.

        By the garbage collector, in any thread.
        """
        finalizer = weakref.finalize(self._memory, _pass_on, self._mapping, call, *arguments)
        finalizer.atexit = False

    def tensor(self, ref: TensorRef) -> Tensor:
        """The tensor that `ref` names, as a view on this buffer.

        Raises ProtocolError if the ref does not lie in the buffer: it came from another process.
        Make views in the thread that uses them: those made in inference mode cannot be written
        outside it.
        """
        dtype = DTYPES.get(ref.dtype)
        if dtype is None:
            raise ProtocolError(f"tensor of dtype {ref.dtype!r}; it may be {', '.join(DTYPES)}")
        if len(ref.shape) > MAX_DIMS or any(length < 0 for length in ref.shape):
            raise ProtocolError(
                f"tensor of shape {ref.shape}; it may have {MAX_DIMS} dims, none negative"
            )
        count = math.prod(ref.shape)
        # Of an empty tensor too: torch works out its strides.
        span = math.prod(max(length, 1) for length in ref.shape)
        if (
            span * dtype.itemsize > MAX_BUFFER_BYTES
            or ref.offset < 0
            or ref.offset % dtype.itemsize
            or ref.offset + count * dtype.itemsize > self.size
        ):
            raise ProtocolError(
                f"a {ref.dtype} tensor of shape {ref.shape} at byte {ref.offset} does not lie, "
                f"aligned, in a buffer of {self.size} bytes"
            )
        if count == 0:  # torch.frombuffer refuses it
            return torch.empty(ref.shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=ref.offset)
        return flat.view(ref.shape)


def view_of(buffers: Sequence[SharedBuffer], ref: TensorRef) -> Tensor:
    """The tensor that `ref` names. Raises ProtocolError if it does not lie in one of `buffers`."""
    if not 0 <= ref.buffer < len(buffers):
        raise ProtocolError(f"a tensor names buffer {ref.buffer} of {len(buffers)}")
    return buffers[ref.buffer].tensor(ref)


def create_buffer(size: int) -> int:
    """Descriptor of a new zeroed buffer of `size` bytes, sealed against resizing."""
    fd = os.memfd_create("comfy-wan-dist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_buffer(fd: int) -> SharedBuffer:
    """Map a buffer whole. The descriptor stays the caller's.

    Raises ProtocolError if it is not a memfd sealed against resizing: its pages could vanish while
    they are read.
    """
    size = os.fstat(fd).st_size
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS or not 0 < size <= MAX_BUFFER_BYTES:
        raise ProtocolError(
            f"a descriptor of {size} bytes with seals {seals} is not a sealed shared buffer"
        )
    return SharedBuffer(mmap.mmap(fd, size))


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTensor:
    """A tensor that lies where ranks see it, for any number of jobs. Its buffer is free once nobody has this."""

    fd: int
    buffer: SharedBuffer
    ref: TensorRef


class BufferPool:
    """Makes buffers and keeps used ones, up to `max_idle_bytes`. Safe from several threads."""

    def __init__(self, *, max_idle_bytes: int = _DEFAULT_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        # Size and descriptor, smallest first.
        self._idle: list[tuple[int, int, SharedBuffer]] = []
        # Buffers whose tensors died; filled by the garbage collector at any moment, so without the lock.
        self._returned: deque[tuple[int, SharedBuffer]] = deque()
        self._closed = False

    def take(self, size: int) -> tuple[int, SharedBuffer]:
        """Descriptor and mapping of a buffer of at least `size` bytes with arbitrary content.

        Hand it back with `give_back` or `give_back_when_unused`.
        """
        wanted = max(_SIZE_STEP, -(-size // _SIZE_STEP) * _SIZE_STEP)
        with self._lock:
            self._collect_returned()
            # Not one far too large: it would be missed by the tensors that it suits.
            fitting = (
                i for i, (have, _, _) in enumerate(self._idle) if wanted <= have <= 2 * wanted
            )
            index = next(fitting, None)
            if index is not None:
                _, fd, buffer = self._idle.pop(index)
                return fd, buffer
        fd = create_buffer(wanted)
        try:
            return fd, map_buffer(fd)
        except BaseException:
            os.close(fd)
            raise

    def give_back(self, fd: int, buffer: SharedBuffer) -> None:
        """Take a buffer back of which no tensor is in use any more."""
        with self._lock:
            self._keep(fd, buffer)

    def give_back_when_unused(self, fd: int, buffer: SharedBuffer) -> None:
        """Take a buffer back once it and the last tensor over it are gone."""
        buffer.when_unused(_return_buffer, weakref.ref(self), fd)

    def keep(self, tensor: Tensor) -> KeptTensor:
        """A copy of `tensor` to lend to parcels."""
        fd, buffer = self.take(tensor.numel() * tensor.element_size())
        self.give_back_when_unused(fd, buffer)
        ref = TensorRef(
            buffer=0, offset=0, dtype=_dtype_name(tensor.dtype), shape=tuple(tensor.shape)
        )
        buffer.tensor(ref).copy_(tensor)
        return KeptTensor(fd=fd, buffer=buffer, ref=ref)

    def close(self) -> None:
        """Free what is idle, and from now on whatever comes back. Tensors in use stay valid."""
        with self._lock:
            self._closed = True
            self._collect_returned()
            self._trim(0)

    def _collect_returned(self) -> None:
        while self._returned:
            self._keep(*self._returned.popleft())

    def _keep(self, fd: int, buffer: SharedBuffer) -> None:
        self._idle.append((buffer.size, fd, buffer))
        self._idle.sort(key=lambda entry: entry[0])
        self._trim(0 if self._closed else self._max_idle_bytes)

    def _trim(self, limit: int) -> None:
        total = sum(size for size, _, _ in self._idle)
        while total > limit:
            size, fd, _ = self._idle.pop()  # the largest
            os.close(fd)
            total -= size

    def _accept(self, fd: int, buffer: SharedBuffer) -> None:
        """Called by the garbage collector, maybe in a thread that holds the lock: never wait."""
        self._returned.append((fd, buffer))
        if self._lock.acquire(blocking=False):
            try:
                self._collect_returned()
            finally:
                self._lock.release()


def _pass_on(mapping: mmap.mmap, call: Callable[..., None], *arguments: Any) -> None:
    call(SharedBuffer(mapping), *arguments)


def _return_buffer(buffer: SharedBuffer, pool_ref: weakref.ref[BufferPool], fd: int) -> None:
    pool = pool_ref()
    if pool is None:
        os.close(fd)
    else:
        pool._accept(fd, buffer)


class Parcel:
    """The tensors of one job on the client's side: inputs, room for results, their descriptors.

    Use it as a context manager, and leave it only when no rank works on the job any more:
    `WorkerGroup.run` guarantees that when it returns or raises. Tensors from `tensor(result)`
    outlive it.

        with group.parcel() as parcel:
            noisy, cond = parcel.pack([noisy_tensor, cond_tensor])
            result = parcel.reserve((1, 48, 31, 44, 80), torch.float32)
            await group.run(SampleRequest(..., noisy=noisy, cond=cond, result=result), parcel)
            latent = parcel.tensor(result)
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._buffers: list[tuple[int, SharedBuffer]] = []
        self._reserved: set[int] = set()
        self._lent: set[int] = set()

    def __enter__(self) -> Parcel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        buffers, self._buffers = self._buffers, []
        for index, (fd, buffer) in enumerate(buffers):
            if index in self._lent:
                continue
            if index in self._reserved:
                self._pool.give_back_when_unused(fd, buffer)
            else:
                self._pool.give_back(fd, buffer)

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors in the order in which refs count them. They stay the parcel's."""
        return tuple(fd for fd, _ in self._buffers)

    def pack(self, tensors: Sequence[Tensor]) -> tuple[TensorRef, ...]:
        """Copy `tensors`, of any device and layout, into one new buffer; refs in the same order."""
        refs = []
        end = 0
        for tensor in tensors:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            refs.append(
                TensorRef(
                    buffer=len(self._buffers),
                    offset=offset,
                    dtype=_dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                )
            )
            end = offset + tensor.numel() * tensor.element_size()
        self._buffers.append(self._pool.take(end))
        for ref, tensor in zip(refs, tensors, strict=True):
            self.tensor(ref).copy_(tensor)
        return tuple(refs)

    def lend(self, kept: KeptTensor) -> TensorRef:
        """A kept tensor among this job's, without a copy."""
        ref = replace(kept.ref, buffer=len(self._buffers))
        self._lent.add(ref.buffer)
        self._buffers.append((kept.fd, kept.buffer))
        return ref

    def reserve(self, shape: Sequence[int], dtype: torch.dtype) -> TensorRef:
        """Room for a result; its content is arbitrary until a rank has written it."""
        ref = TensorRef(
            buffer=len(self._buffers), offset=0, dtype=_dtype_name(dtype), shape=tuple(shape)
        )
        self._reserved.add(ref.buffer)
        self._buffers.append(self._pool.take(math.prod(shape) * dtype.itemsize))
        return ref

    def tensor(self, ref: TensorRef) -> Tensor:
        """View of a packed or reserved tensor. Views of packed ones must not outlive the parcel."""
        return self._buffers[ref.buffer][1].tensor(ref)


def split_ref(ref: TensorRef, sizes: Sequence[int]) -> tuple[TensorRef, ...]:
    """A tensor cut into `sizes` along its first dim, where it lies."""
    row_bytes = math.prod(ref.shape[1:]) * DTYPES[ref.dtype].itemsize
    parts = []
    start = 0
    for size in sizes:
        parts.append(
            replace(ref, offset=ref.offset + start * row_bytes, shape=(size, *ref.shape[1:]))
        )
        start += size
    return tuple(parts)


class MapCache:
    """Mappings of received buffers, kept while a client that reuses its buffers sends them again.

    Used by one thread. Holding a mapping keeps its buffer alive, so its inode number names it
    without doubt.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._mappings: OrderedDict[tuple[int, int], SharedBuffer] = OrderedDict()

    def adopt(self, fds: Sequence[int]) -> tuple[SharedBuffer, ...]:
        """Map received descriptors and close them. Raises ProtocolError as `map_buffer`."""
        try:
            buffers = tuple(self._adopt_one(fd) for fd in fds)
        finally:
            for fd in fds:
                os.close(fd)
        while sum(buffer.size for buffer in self._mappings.values()) > self._max_bytes:
            self._mappings.popitem(last=False)
        return buffers

    def _adopt_one(self, fd: int) -> SharedBuffer:
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        buffer = self._mappings.get(key)
        if buffer is None:
            buffer = self._mappings[key] = map_buffer(fd)
        self._mappings.move_to_end(key)
        return buffer


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"a tensor of dtype {name} cannot travel; convert it to one of {', '.join(DTYPES)}"
        )
    return name
