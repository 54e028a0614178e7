"""One run on a plane for one request or for several that share it; the first member leads.

The leader's caller has the run done. The others wait in tasks of their own, maybe in other threads, and may leave at
any moment: under one lock a member's tensors are touched only while it is a member, so that it may free them as soon as
`leave` returns. The ranks work on copies, which are the leader's.

Covered: joining and handing out, progress, leaving, the end of a run for each member. Not covered: who becomes a
member, and what a member does after a run that gave it nothing (scheduler.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

from torch import Tensor

from ..ipc.errors import ProtocolError
from ..ipc.messages import Done, Progress, Request, SampleRequest, TensorRef
from ..ipc.shared import Parcel, SharedBuffer, map_buffer
from .joining import join_requests, split_results
from .spec import LaunchSpec


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
        self._buffers: dict[int, SharedBuffer] = {}

    def tensor(self, ref: TensorRef) -> Tensor:
        """A view on the caller's buffer."""
        if not 0 <= ref.buffer < len(self.fds):
            raise ProtocolError(f"a tensor names buffer {ref.buffer} of {len(self.fds)}")
        if ref.buffer not in self._buffers:
            self._buffers[ref.buffer] = map_buffer(self.fds[ref.buffer])
        return self._buffers[ref.buffer].tensor(ref)

    def forget_buffers(self) -> None:
        self._buffers.clear()


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
