"""Which requests may share a run, how many, what one request for all of them holds, and what each gets back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from group_kit import empty_request
from joining_kit import (
    BATCH_DIMS,
    LATENT,
    TENSOR_OPTIONS,
    make_request,
    make_tensors,
    sampled,
)

from comfy_wan_dist.group.shared_run import (
    batch_dims,
    is_joinable,
    join_requests,
    split_results,
)
from comfy_wan_dist.ipc.messages import (
    ModelSpec,
    SampleRequest,
    TensorRef,
    tensor_refs,
)
from comfy_wan_dist.ipc.shared import BufferPool, Parcel
from comfy_wan_dist.mesh.choice import joint_samples, peak_bytes
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from comfy_wan_dist.mesh.workload import Workload


def test_every_tensor_of_a_request_has_its_batch_dim() -> None:
    named = {f.name for f in fields(SampleRequest) if "TensorRef" in str(f.type)}
    assert named == {name for name in BATCH_DIMS if "." not in name}
    with Parcel(BufferPool()) as parcel:
        request = make_request("a", make_tensors(1), parcel)
        assert batch_dims(request) == BATCH_DIMS


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool()
    yield pool
    pool.close()


@pytest.fixture
def parcel(pool: BufferPool) -> Iterator[Parcel]:
    with Parcel(pool) as parcel:
        yield parcel


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"latent": (3, 2, 4, 6)}, {}),
        ({"latent": (3, 3, 4, 4)}, {}),
        ({"tokens": 6}, {}),
        *[({"leave_out": (name,)}, {}) for name in TENSOR_OPTIONS],
        ({}, {"model": ModelSpec(path="m", file_bytes=1, mtime_ns=2, dtype="x", compile=False)}),
        ({}, {"mesh": "cfg2-pp2"}),
        ({}, {"solver": "euler"}),
        ({}, {"sigmas": (1.0, 0.9, 0.7, 0.3, 0.0)}),
        ({}, {"timesteps": (1000.0, 900.0, 700.0, 300.0)}),
        ({}, {"start": 0.9}),
        ({}, {"guidance": 4.0}),
        ({}, {"guidance": float("nan")}),
        ({}, {"result": TensorRef(buffer=0, offset=0, dtype="float32", shape=(1, 1))}),
        ({}, {"noisy": TensorRef(buffer=0, offset=0, dtype="float32", shape=())}),
        ({"text_batch": 3}, {}),
    ],
)
def test_requests_that_differ_in_more_than_their_samples_are_not_joinable(
    parcel: Parcel, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    first = make_request("a", make_tensors(1), parcel)
    other = replace(make_request("b", make_tensors(2, **options), parcel), **changes)
    assert is_joinable(first, make_request("c", make_tensors(3), parcel))
    assert is_joinable(first, make_request("c", make_tensors(3, batch=2), parcel))
    assert is_joinable(first, make_request("c", make_tensors(3, batch=2, text_batch=2), parcel))
    assert not is_joinable(first, other)
    assert not is_joinable(other, first)
    assert not is_joinable(first, empty_request("d"))


@pytest.mark.parametrize("leave_out", [(), TENSOR_OPTIONS])
def test_joined_request_gives_each_its_samples(
    parcel: Parcel, pool: BufferPool, leave_out: Sequence[str]
) -> None:
    given = [
        make_tensors(1, leave_out=leave_out),
        make_tensors(2, batch=3, leave_out=leave_out),
        make_tensors(3, batch=2, text_batch=2, leave_out=leave_out),
    ]
    requests = [make_request(str(i), tensors, parcel) for i, tensors in enumerate(given)]
    with Parcel(pool) as own:
        joined = join_requests(requests, [parcel.tensor] * 3, own)
        assert joined.id == "0+1+2"
        tensors = {name: own.tensor(ref) for name, ref in tensor_refs(joined).items()}
        result = tensors.pop("result")
        assert result.shape == (6, *LATENT)
        assert tensors["cond"].shape[0] == 6
        assert set(tensors) == set(given[0])
        parts = split_results(sampled(tensors), requests)
    for part, alone in zip(parts, given, strict=True):
        assert torch.equal(part, sampled(alone))


def test_prompt_of_all_stays_one_embedding(parcel: Parcel, pool: BufferPool) -> None:
    tensors = [make_tensors(seed) for seed in (1, 2)]
    tensors[1]["uncond"] = tensors[0]["uncond"].clone()
    requests = [make_request(str(i), own, parcel) for i, own in enumerate(tensors)]
    with Parcel(pool) as own:
        joined = join_requests(requests, [parcel.tensor] * 2, own)
        assert joined.uncond is not None
        assert joined.uncond.shape[0] == 1
        assert torch.equal(own.tensor(joined.uncond), tensors[0]["uncond"])
        assert torch.equal(own.tensor(joined.cond), torch.cat([t["cond"] for t in tensors]))


# ---- how many


WAN = WanShape(dim=3072, ffn_dim=14336, num_layers=30, in_dim=48, out_dim=48)
GRID = LatentGrid(frames=31, rows=22, columns=40)


def planned(batch: int) -> Workload:
    return Workload(shape=WAN, grid=GRID, steps=1, guided=True, batch=batch, text_batch=batch)


def test_runs_are_shared_up_to_a_sample_for_each_stage() -> None:
    def most(mesh: MeshDegrees, batch: int = 1, device_memory: int | None = None) -> int:
        return joint_samples(mesh, planned(batch), device_memory=device_memory)

    assert most(MeshDegrees(cfg=2, ulysses=2)) == 0
    assert most(MeshDegrees(pp=3)) == 3
    assert most(MeshDegrees(pp=3), batch=2) == 3
    assert most(MeshDegrees(pp=3), batch=3) == 0
    assert most(MeshDegrees(dp=2, pp=2), batch=2) == 4


def test_runs_are_shared_only_as_far_as_memory_allows() -> None:
    mesh = MeshDegrees(pp=3)
    needs = [peak_bytes(planned(samples), mesh) for samples in (1, 2, 3)]
    assert needs == sorted(set(needs))
    for memory, most in [(needs[0], 0), (needs[1], 2), (needs[2] - 1, 2), (needs[2], 3)]:
        assert joint_samples(mesh, planned(1), device_memory=memory) == most
