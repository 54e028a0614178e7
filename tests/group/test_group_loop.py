"""The rank's loop and its inbox: what is answered, and what ends it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from comfy_wan_dist.ipc.channel import SocketChannel
from comfy_wan_dist.ipc.errors import ConfigError, JobCancelled, MeshError
from comfy_wan_dist.ipc.messages import (
    Cancel,
    DecodeRequest,
    Done,
    Failed,
    Message,
    Progress,
    Request,
    Shutdown,
    TensorRef,
    VAESpec,
)
from comfy_wan_dist.ipc.shared import BufferPool, Parcel
from workers.job import Job, JobStats
from workers.parallel.agreement import Agreement
from workers.process.buffers import build_buffers
from workers.process.loop import Inbox, Loop


class ScriptedRunner:
    """Does what the request's path names."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def run(self, request: Request, job: Job) -> JobStats:
        assert isinstance(request, DecodeRequest)
        match request.vae.path:
            case "echo":
                assert not job.cancel_requested()
                job.tensor(request.result).copy_(job.tensor(request.latent) + 1)
            case "config":
                job.agree(ConfigError("no"))
            case "unvoted":
                raise MeshError("no")
            case "crash":
                raise RuntimeError("broken")
            case "cancel":
                self.started.set()
                while not job.agree_stop():
                    pass
                assert job.cancel_requested()
                raise JobCancelled("stopped")
            case "report":
                job.report("sample", 1, 2)
                job.report("sample", 2, 2)
                job.report("decode", 1, 2)
        return JobStats(bytes_read=5)


class Rank:
    """A loop in a thread, and the client's end of its channel."""

    def __init__(self) -> None:
        self.client, self.channel = map(SocketChannel, socket.socketpair())
        self.ends: list[tuple[str, int]] = []
        self.runner = ScriptedRunner()
        inbox = Inbox(
            self.channel, on_end=lambda reason, status: self.ends.append((reason, status))
        )
        inbox.start()
        self.inbox = inbox
        agreement = Agreement(rank=0, size=1, group=None)
        loop = Loop(
            channel=self.channel,
            inbox=inbox,
            runner=self.runner,
            agreement=agreement,
            adopt=build_buffers(rank=0, head_ranks=1, world_size=1, agreement=agreement),
            rank=0,
        )
        self.status: int | None = None
        self.thread = threading.Thread(target=self._serve, args=(loop,), daemon=True)
        self.thread.start()
        self.pool = BufferPool()

    def _serve(self, loop: Loop) -> None:
        self.status = loop.serve()

    def ask(self, action: str, id: str = "job") -> Message:
        with Parcel(self.pool) as parcel:
            (latent,) = parcel.pack([torch.arange(4.0)])
            result = parcel.reserve((4,), torch.float32)
            spec = VAESpec(path=action, file_bytes=1, mtime_ns=1, dtype="float32")
            request = DecodeRequest(id=id, vae=spec, latent=latent, result=result)
            self.client.send(request, parcel.fds, timeout_s=1)
            answer = self.client.receive(5).message
            self.result = parcel.tensor(result)
        return answer

    def end(self) -> int | None:
        self.thread.join(5)
        return self.status


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.client.send(Shutdown(), timeout_s=1)
    rank.end()
    rank.client.close()
    rank.channel.close()
    rank.pool.close()


def test_loop_answers_a_job_and_writes_its_result(rank: Rank) -> None:
    answer = rank.ask("echo")
    assert isinstance(answer, Done)
    assert (answer.id, answer.rank, answer.bytes_read) == ("job", 0, 5)
    assert torch.equal(rank.result, torch.arange(4.0) + 1)


@pytest.mark.parametrize(("action", "error"), [("config", "ConfigError"), ("unvoted", "MeshError")])
def test_loop_survives_an_error_that_all_ranks_share(rank: Rank, action: str, error: str) -> None:
    answer = rank.ask(action)
    assert isinstance(answer, Failed)
    assert (answer.error, answer.message, answer.fatal) == (error, "no", False)
    assert isinstance(rank.ask("echo"), Done)


def test_loop_ends_after_an_unexpected_error(rank: Rank) -> None:
    answer = rank.ask("crash")
    assert isinstance(answer, Failed)
    assert (answer.error, answer.fatal) == ("RuntimeError", True)
    assert "broken" in answer.traceback
    assert rank.end() == 1


def test_loop_refuses_a_ref_outside_its_buffer_and_survives(rank: Rank) -> None:
    ref = TensorRef(buffer=3, offset=0, dtype="float32", shape=(4,))
    spec = VAESpec(path="echo", file_bytes=1, mtime_ns=1, dtype="float32")
    rank.client.send(DecodeRequest(id="x", vae=spec, latent=ref, result=ref), timeout_s=1)
    answer = rank.client.receive(5).message
    assert isinstance(answer, Failed)
    assert (answer.error, answer.fatal) == ("ProtocolError", False)
    assert isinstance(rank.ask("echo"), Done)


def test_cancel_stops_its_job_only(rank: Rank) -> None:
    rank.client.send(Cancel(id="job"), timeout_s=1)  # of a job that does not exist yet
    assert isinstance(rank.ask("echo"), Done)

    def cancel() -> None:
        rank.runner.started.wait(5)
        rank.client.send(Cancel(id="other"), timeout_s=1)
        rank.client.send(Cancel(id="job"), timeout_s=1)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    answer = rank.ask("cancel")
    canceller.join()
    assert isinstance(answer, Failed)
    assert (answer.error, answer.fatal) == ("JobCancelled", False)
    assert isinstance(rank.ask("echo"), Done)


def test_shutdown_stops_the_running_job(rank: Rank) -> None:

    def stop() -> None:
        rank.runner.started.wait(5)
        rank.client.send(Shutdown(), timeout_s=1)

    stopper = threading.Thread(target=stop)
    stopper.start()
    answer = rank.ask("cancel")
    stopper.join()
    assert isinstance(answer, Failed)
    assert answer.error == "JobCancelled"
    assert rank.end() == 0


def test_every_report_reaches_the_client_in_order(rank: Rank) -> None:
    seen: list[Message] = [rank.ask("report")]
    while isinstance(seen[-1], Progress):
        seen.append(rank.client.receive(5).message)
    *progress, done = seen
    assert isinstance(done, Done)
    expected = [("sample", 1, 2), ("sample", 2, 2), ("decode", 1, 2)]
    assert progress == [Progress(id="job", phase=p, done=d, total=t) for p, d, t in expected]


def test_loop_leaks_no_descriptor(rank: Rank) -> None:
    rank.ask("echo")
    rank.result = torch.empty(0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        rank.ask("echo")
        rank.result = torch.empty(0)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("kind", ["closed", "nonsense"])
def test_inbox_ends_the_process_when_the_client_goes(kind: str) -> None:
    client, theirs = socket.socketpair()
    ended = threading.Event()
    statuses: list[int] = []

    def on_end(reason: str, status: int) -> None:
        statuses.append(status)
        ended.set()

    channel = SocketChannel(theirs)
    Inbox(channel, on_end=on_end).start()
    if kind == "nonsense":
        client.send(b"\x01\0\0\0?")
    else:
        client.close()
    assert ended.wait(5)
    client.close()
    channel.close()
    assert statuses == [0 if kind == "closed" else 1]
