"""Several sampling requests as one: their batches side by side.

A pipeline's stages are busy together only with several micro-batches, and each sample of a batch is one. A sample is
computed alike in whatever batch it lies, so each request gets what it would get alone.

Covered: which requests may share a run, the joined request, and each one's part of the result. Not covered: who shares
a run with whom (scheduler.py), and who may leave it (shared_run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..ipc.messages import (
    COND,
    RESULT,
    UNCOND,
    Request,
    SampleRequest,
    TensorRef,
    tensor_refs,
    with_tensor_refs,
)
from ..ipc.shared import Parcel

TensorOf = Callable[[TensorRef], Tensor]

STEP_NOISE_DIM = 1
"""Where the samples of `step_noise` lie; those of all other fields lie in dim 0."""
PROMPTS = (COND, UNCOND)


def batch_dims(request: SampleRequest) -> dict[str, int]:
    """The dim in which the samples of each of its tensors lie; a length of 1 there serves all samples."""
    dims = dict.fromkeys(tensor_refs(request), 0)
    if request.step_noise is not None:
        dims["step_noise"] = STEP_NOISE_DIM
    for number, condition in enumerate(request.conditions):
        dims[f"conditions.{number}"] = condition.batch_dim
    return dims


def _is_of_prompt(name: str) -> bool:
    return name in PROMPTS or name.startswith("conditions.")


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

    named = [tensor_refs(request) for request in requests]
    dims = batch_dims(requests[0])

    def join(name: str, dim: int) -> TensorRef:
        parts = [tensor(refs[name]) for tensor, refs in zip(tensors, named, strict=True)]
        if _is_of_prompt(name) and all(
            part.shape[dim] == 1 and torch.equal(part, parts[0]) for part in parts
        ):
            return parcel.pack(parts[:1])[0]
        shape = list(parts[0].shape)
        shape[dim] = sum(sizes)
        ref = parcel.reserve(shape, parts[0].dtype)
        if name != RESULT:
            for room, part in zip(parcel.tensor(ref).split(sizes, dim), parts, strict=True):
                room.copy_(part)
        return ref

    joined = with_tensor_refs(requests[0], {name: join(name, dim) for name, dim in dims.items()})
    return replace(joined, id="+".join(request.id for request in requests))


def split_results(joined: Tensor, requests: Sequence[SampleRequest]) -> tuple[Tensor, ...]:
    """Each request's part of the joined result, as views."""
    parts: tuple[Tensor, ...] = joined.split([batch_of(request) for request in requests])
    return parts


def _is_regular(request: SampleRequest) -> bool:
    """Whether each tensor has a sample for each of `noisy`, or one for all. Others are for the ranks to refuse."""
    batch = batch_of(request)
    if batch == 0 or request.result.shape != request.noisy.shape:
        return False
    dims = batch_dims(request)
    return all(
        len(ref.shape) > dims[name] and ref.shape[dims[name]] in (1, batch)
        for name, ref in tensor_refs(request).items()
    )


def _without_samples(request: SampleRequest) -> SampleRequest:
    """What requests of one run must have in common: shapes without the batch, and all that is no tensor."""
    dims = batch_dims(request)
    refs = {
        name: replace(
            ref,
            buffer=0,
            offset=0,
            shape=(*ref.shape[: dims[name]], *ref.shape[dims[name] + 1 :]),
        )
        for name, ref in tensor_refs(request).items()
    }
    return replace(with_tensor_refs(request, refs), id="")
