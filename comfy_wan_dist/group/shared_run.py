"""One run on a plane for one request or for several that share it: their batches side by side, as one request.

A pipeline's stages are busy together only with several micro-batches, and each sample of a batch is one. A sample is
computed alike in whatever batch it lies, so each request gets what it would get alone.

The first member leads: its caller has the run done. The others wait in tasks of their own, maybe in other threads, and
may leave at any moment: under one lock a member's tensors are touched only while it is a member, so that it may free
them as soon as `leave` returns. The ranks work on copies, which are the leader's.

Covered: which requests may share a run, joining and handing out, progress, leaving, the end of a run for each member.
Not covered: who shares a run with whom (queue.py), and what a member does after a run that gave it nothing
(scheduler.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..ipc.messages import (
    COND,
    RESULT,
    UNCOND,
    Done,
    Progress,
    Request,
    SampleRequest,
    TensorRef,
    tensor_refs,
    with_tensor_refs,
)
from ..ipc.shared import Parcel, SharedBuffer, map_buffer, view_of
from .spec import LaunchSpec

TensorOf = Callable[[TensorRef], Tensor]

STEP_NOISE_DIM = 1
"""Where the samples of `step_noise` lie; those of all other fields lie in dim 0."""
PROMPTS = (COND, UNCOND)


class RunDisbanded(Exception):
    """The leader left before the run was done."""


class RunRefused(Exception):
    """The ranks refused the shared run; which of its requests they would refuse alone is not known."""


class Member:
    """A request in a run. fds: the descriptors that its refs count; they stay its caller's."""

    def __init__(self, request: Request, fds: Sequence[int]) -> None:
        self.request = request
        self.fds = tuple(fds)
        self.progress: deque[Progress] = deque()
        self.answers: Future[tuple[Done, ...]] = Future()
        self._buffers: tuple[SharedBuffer, ...] = ()

    def tensor(self, ref: TensorRef) -> Tensor:
        """A view on the caller's buffer."""
        if not self._buffers:
            self._buffers = tuple(map(map_buffer, self.fds))
        return view_of(self._buffers, ref)

    def forget_buffers(self) -> None:
        self._buffers = ()


class SharedRun:
    """Safe from several threads once all members are in."""

    def __init__(self, plane: LaunchSpec, members: Sequence[Member]) -> None:
        self.plane = plane
        self._leader = members[0]
        self._lock = threading.Lock()
        self._present = list(members)
        self._joined: tuple[Member, ...] = ()

    @property
    def requests(self) -> int:
        """How many requests the ranks were given as one."""
        return len(self._joined)

    def is_led_by(self, member: Member) -> bool:
        return member is self._leader

    # ---- the leader's ------------------------------------------------------------------------------

    def join(self, parcel: Parcel) -> tuple[Request, tuple[int, ...]]:
        """What the ranks are to do for those who are still here, and its descriptors: copies in `parcel`, or the
        leader's own if it is alone."""
        with self._lock:
            self._joined = tuple(self._present)
            if len(self._joined) == 1:
                return self._leader.request, self._leader.fds
            requests = self._sample_requests()
            request = join_requests(requests, [member.tensor for member in self._joined], parcel)
            for member, own in zip(self._joined, requests, strict=True):
                member.tensor(own.result)  # mapped now, so that nothing can fail when it is there
            return request, parcel.fds

    def tell(self, progress: Progress) -> None:
        """Let the others know; the leader does already."""
        for member in self._joined[1:]:
            member.progress.append(progress)

    def hand_out(self, result: Tensor, answers: tuple[Done, ...]) -> None:
        """Copy to each member who is still here its part of the joined result."""
        requests = self._sample_requests()
        parts = split_results(result, requests)
        for member, request, part in zip(self._joined, requests, parts, strict=True):
            with self._lock:
                if member in self._present:
                    member.tensor(request.result).copy_(part)
                    member.answers.set_result(answers)
                    self._remove(member)

    def fail(self, error: Exception) -> None:
        """Tell the others that the run gave nothing."""
        with self._lock:
            for member in [member for member in self._present if member is not self._leader]:
                member.answers.set_exception(error)
                self._remove(member)

    # ---- each member's -----------------------------------------------------------------------------

    def leave(self, member: Member) -> None:
        """Go, whether or not the run is done; without its leader it is not. May be called again."""
        if self.is_led_by(member):
            self.fail(RunDisbanded())
        with self._lock:
            if member in self._present:
                self._remove(member)

    def _remove(self, member: Member) -> None:
        self._present.remove(member)
        member.forget_buffers()

    def _sample_requests(self) -> list[SampleRequest]:
        return [cast(SampleRequest, member.request) for member in self._joined]


# ---- requests side by side --------------------------------------------------------------------------


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
