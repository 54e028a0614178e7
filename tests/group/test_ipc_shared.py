"""Tensors in shared memory: bounds, sealing, the pool, and the cache of mappings."""

from __future__ import annotations

import gc
import mmap
import os
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comfy_wan_dist.ipc.errors import ProtocolError
from comfy_wan_dist.ipc.messages import TensorRef
from comfy_wan_dist.ipc.shared import (
    ALIGNMENT,
    DTYPES,
    BufferPool,
    MapCache,
    Parcel,
    create_buffer,
    map_buffer,
    split_ref,
)

MIB = 2**20


def idle_bytes(pool: BufferPool) -> int:
    """Bytes of the buffers that wait to be taken again."""
    with pool._lock:
        pool._collect_returned()
    return sum(size for size, _, _ in pool._idle)


def ref(
    shape: tuple[int, ...], *, buffer: int = 0, offset: int = 0, dtype: str = "float32"
) -> TensorRef:
    return TensorRef(buffer=buffer, offset=offset, dtype=dtype, shape=shape)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_parcel_round_trip_through_a_second_mapping_is_bit_equal() -> None:
    tensors = [
        torch.randn(3, 5),
        torch.randn(2, 7).to(torch.bfloat16),
        torch.arange(10, dtype=torch.uint8),
        torch.randn(4, 6).T,  # not contiguous
        torch.empty(0, 3),
        torch.tensor(7, dtype=torch.int64),
        torch.randn(5).half().expand(2, 5),
    ]
    with Parcel(BufferPool()) as parcel:
        refs = parcel.pack(tensors)
        assert all(ref.offset % ALIGNMENT == 0 and ref.buffer == 0 for ref in refs)
        (received,) = MapCache(max_bytes=MIB).adopt([os.dup(fd) for fd in parcel.fds])
        for tensor, tensor_ref in zip(tensors, refs, strict=True):
            got = received.tensor(tensor_ref)
            assert got.dtype == tensor.dtype
            assert got.shape == tensor.shape
            assert torch.equal(got, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_ref_names_the_rows_where_they_lie(dtype: torch.dtype) -> None:
    whole = torch.arange(5 * 6).view(5, 2, 3).to(dtype)
    with Parcel(BufferPool()) as parcel:
        _, ref = parcel.pack([torch.zeros(3), whole])
        parts = split_ref(ref, [2, 0, 3])
        for part, expected in zip(parts, whole.split([2, 0, 3]), strict=True):
            assert torch.equal(parcel.tensor(part), expected)
        parcel.tensor(parts[2]).fill_(7)
        assert torch.equal(parcel.tensor(ref)[2:], torch.full((3, 2, 3), 7).to(dtype))


def test_parcel_result_is_seen_without_a_copy_and_outlives_parcel_and_pool() -> None:
    pool = BufferPool()
    with Parcel(pool) as parcel:
        parcel.pack([torch.zeros(1)])
        result_ref = parcel.reserve((2, 3), torch.float32)
        remote = MapCache(max_bytes=MIB).adopt([os.dup(fd) for fd in parcel.fds])
        result = parcel.tensor(result_ref)
        remote[result_ref.buffer].tensor(result_ref).fill_(5)
    pool.close()
    del pool, parcel, remote
    gc.collect()
    assert torch.equal(result, torch.full((2, 3), 5.0))


def test_parcel_refuses_dtypes_that_do_not_travel() -> None:
    with Parcel(BufferPool()) as parcel, pytest.raises(ValueError, match="bool"):
        parcel.pack([torch.zeros(2, dtype=torch.bool)])


@pytest.mark.parametrize(
    "bad",
    [
        ref((MIB // 4 + 1,)),
        ref((1,), offset=MIB),
        ref((1,), offset=-4),
        ref((1,), offset=2),
        ref((-1,)),
        ref((-1, -1)),
        ref((2**62, 4)),
        ref((2**40, 2**40)),
        ref((1,), dtype="float128"),
        ref((1,), dtype="__class__"),
        ref((1,) * 20),
        ref((0,), offset=2 * MIB),
    ],
)
def test_tensor_refuses_a_ref_outside_its_buffer(bad: TensorRef) -> None:
    fd = create_buffer(MIB)
    buffer = map_buffer(fd)
    os.close(fd)
    with pytest.raises(ProtocolError):
        buffer.tensor(bad)


@settings(deadline=None, max_examples=300)
@given(
    offset=st.integers(-8, 5000) | st.integers(),
    dtype=st.sampled_from([*DTYPES, "bool", ""]),
    shape=st.lists(st.integers(-2, 70) | st.integers(), max_size=10),
)
def test_tensor_of_any_ref_lies_in_the_buffer_or_raises(
    offset: int, dtype: str, shape: list[int]
) -> None:
    fd = create_buffer(4096)
    buffer = map_buffer(fd)
    os.close(fd)
    try:
        tensor = buffer.tensor(ref(tuple(shape), offset=offset, dtype=dtype))
    except ProtocolError:
        return
    assert tensor.numel() * tensor.element_size() <= 4096
    tensor.zero_()  # would end the process outside the mapping


def test_buffer_cannot_be_resized() -> None:
    fd = create_buffer(MIB)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_map_buffer_refuses_a_file_that_could_shrink(tmp_path: os.PathLike[str]) -> None:
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, MIB)
    plain = os.open(os.path.join(tmp_path, "f"), os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, MIB)
    pipe = os.pipe()
    for fd in (unsealed, plain, *pipe):
        with pytest.raises(ProtocolError, match="sealed"):
            map_buffer(fd)
        os.close(fd)


def test_map_cache_closes_every_descriptor_also_when_one_is_refused() -> None:
    gc.collect()
    before = open_fds()
    cache = MapCache(max_bytes=MIB)
    with pytest.raises(ProtocolError):
        cache.adopt([create_buffer(MIB), os.open(os.devnull, os.O_RDONLY), create_buffer(MIB)])
    del cache
    gc.collect()
    assert open_fds() <= before


def test_map_cache_reuses_mappings_within_its_limit() -> None:
    cache = MapCache(max_bytes=2 * MIB)
    fds = [create_buffer(MIB) for _ in range(3)]
    first, second, third = cache.adopt([os.dup(fd) for fd in fds])
    assert cache.adopt([os.dup(fds[1])])[0] is second
    assert cache.adopt([os.dup(fds[2])])[0] is third
    assert cache.adopt([os.dup(fds[0])])[0] is not first
    for fd in fds:
        os.close(fd)


def test_pool_reuses_an_input_buffer_with_its_mapping() -> None:
    pool = BufferPool()
    with Parcel(pool) as parcel:
        parcel.pack([torch.zeros(10)])
        inode = os.fstat(parcel.fds[0]).st_ino
        buffer = parcel._buffers[0][1]
    with Parcel(pool) as parcel:
        parcel.pack([torch.zeros(20)])
        assert os.fstat(parcel.fds[0]).st_ino == inode
        assert parcel._buffers[0][1] is buffer
    pool.close()


def test_pool_takes_a_result_back_only_when_its_last_view_is_gone() -> None:
    pool = BufferPool()
    with Parcel(pool) as parcel:
        result_ref = parcel.reserve((4,), torch.float32)
        result = parcel.tensor(result_ref)
    del parcel
    view = result[1:].view(3, 1)
    del result
    gc.collect()
    assert idle_bytes(pool) == 0
    with Parcel(pool) as other:
        other.reserve((4,), torch.float32)
        other.tensor(ref((4,))).fill_(3)
        view.fill_(9)
        assert torch.equal(other.tensor(ref((4,))), torch.full((4,), 3.0))
    del other, view
    gc.collect()
    assert idle_bytes(pool) == 2 * MIB
    pool.close()


def test_pool_keeps_no_more_idle_bytes_than_allowed() -> None:
    before = open_fds()
    pool = BufferPool(max_idle_bytes=2 * MIB)
    taken = [pool.take(MIB) for _ in range(4)]
    for fd, buffer in taken:
        pool.give_back(fd, buffer)
    del taken, buffer
    assert idle_bytes(pool) == 2 * MIB
    fd, buffer = pool.take(5 * MIB)
    pool.give_back_when_unused(fd, buffer)
    del buffer
    gc.collect()
    assert idle_bytes(pool) <= 2 * MIB
    pool.close()
    gc.collect()
    assert open_fds() == before


def test_pool_closed_or_dropped_frees_what_comes_back_later() -> None:
    before = open_fds()
    for drop in (False, True):
        pool = BufferPool()
        fd, buffer = pool.take(MIB)
        pool.give_back_when_unused(fd, buffer)
        tensor = buffer.tensor(ref((4,)))
        del buffer
        pool.close()
        if drop:
            del pool
        tensor.fill_(1)
        del tensor
        gc.collect()
        assert open_fds() == before


def test_mapping_outlives_its_buffer_object() -> None:
    fd = create_buffer(MIB)
    buffer = map_buffer(fd)
    mapping: weakref.ref[mmap.mmap] = weakref.ref(buffer._mapping)
    tensor = buffer.tensor(ref((4,)))
    os.close(fd)
    del buffer
    gc.collect()
    assert mapping() is not None
    tensor.fill_(1)
    del tensor
    gc.collect()
    assert mapping() is None


def test_views_made_in_inference_mode_do_not_bind_later_ones() -> None:
    pool = BufferPool()
    with torch.inference_mode(), Parcel(pool) as parcel:
        (packed,) = parcel.pack([torch.ones(4)])
        remote = map_buffer(parcel.fds[0])
    assert torch.equal(remote.tensor(packed).add_(1), torch.full((4,), 2.0))
    with Parcel(pool) as parcel:  # the same buffer, outside inference mode
        parcel.pack([torch.zeros(4)])
    pool.close()
