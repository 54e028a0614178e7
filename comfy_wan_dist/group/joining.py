"""Several sampling requests as one: their batches side by side.

A pipeline's stages are busy together only with several micro-batches, and each sample of a batch is one. A sample is
computed alike in whatever batch it lies, so each request gets what it would get alone.

Covered: which requests may share a run, the joined request, and each one's part of the result. Not covered: who shares
a run with whom (scheduler.py), and who may leave it (shared_run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ipc.messages import RESULT, Request, SampleRequest, TensorRef
from ..ipc.shared import Parcel

TensorOf = Callable[[TensorRef], Tensor]

BATCH_DIMS = {
    "noisy": 0,
    "clean": 0,
    "mask": 0,
    "frame_mask": 0,
    "cond": 0,
    "uncond": 0,
    "cond_image": 0,
    "uncond_image": 0,
    "step_noise": 1,
    "result": 0,
}
"""A request's tensors and the dim in which their samples lie; a length of 1 there serves all samples."""
PROMPTS = ("cond", "uncond", "cond_image", "uncond_image")


def batch_of(request: SampleRequest) -> int:
    """How many samples a request has."""
    return request.noisy.shape[0] if request.noisy.shape else 0


def is_joinable(first: Request, second: Request) -> bool:
    """Whether one run can do both: equal in all but their samples, prompts, and how many samples there are."""
    return (
        isinstance(first, SampleRequest)
        and isinstance(second, SampleRequest)
        and _is_regular(first)
        and _is_regular(second)
        and _without_samples(first) == _without_samples(second)
    )


def join_requests(
    requests: Sequence[SampleRequest], tensors: Sequence[TensorOf], parcel: Parcel
) -> SampleRequest:
    """One request for the samples of all, in their order; what it names are copies in `parcel`.

    requests: joinable ones, with `tensors` to look their refs up. What belongs to a prompt that all share stays one.
    """
    sizes = [batch_of(request) for request in requests]

    def join(name: str, dim: int) -> TensorRef | None:
        if getattr(requests[0], name) is None:
            return None
        parts = [
            tensor(getattr(request, name))
            for request, tensor in zip(requests, tensors, strict=True)
        ]
        if name in PROMPTS and all(len(p) == 1 and torch.equal(p, parts[0]) for p in parts):
            return parcel.pack(parts[:1])[0]
        shape = list(parts[0].shape)
        shape[dim] = sum(sizes)
        ref = parcel.reserve(shape, parts[0].dtype)
        if name != RESULT:
            for room, part in zip(parcel.tensor(ref).split(sizes, dim), parts, strict=True):
                room.copy_(part)
        return ref

    refs: dict[str, Any] = {name: join(name, dim) for name, dim in BATCH_DIMS.items()}
    return replace(requests[0], id="+".join(request.id for request in requests), **refs)


def split_results(joined: Tensor, requests: Sequence[SampleRequest]) -> tuple[Tensor, ...]:
    """Each request's part of the joined result, as views."""
    parts: tuple[Tensor, ...] = joined.split([batch_of(request) for request in requests])
    return parts


def _is_regular(request: SampleRequest) -> bool:
    """Whether each tensor has a sample for each of `noisy`, or one for all. Others are for the ranks to refuse."""
    batch = batch_of(request)
    if batch == 0 or request.result.shape != request.noisy.shape:
        return False
    refs = ((getattr(request, name), dim) for name, dim in BATCH_DIMS.items())
    return all(
        len(ref.shape) > dim and ref.shape[dim] in (1, batch)
        for ref, dim in refs
        if ref is not None
    )


def _without_samples(request: SampleRequest) -> SampleRequest:
    """What requests of one run must have in common: shapes without the batch, and all that is no tensor."""
    refs: dict[str, Any] = {
        name: replace(ref, buffer=0, offset=0, shape=(*ref.shape[:dim], *ref.shape[dim + 1 :]))
        for name, dim in BATCH_DIMS.items()
        if (ref := getattr(request, name)) is not None
    }
    return replace(request, id="", **refs)
