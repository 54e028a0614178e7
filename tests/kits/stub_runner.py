"""A runner for tests of the group: a DecodeRequest's `vae.path` says what to do.

echo            result = latent + 1
sleep:N         N steps of 50 ms with a vote on stopping after each
config:R        rank R raises ModelFileError and votes on it
same            every rank raises MeshError without a vote
lonely:R        rank R raises ConfigError without a vote while the others vote on
crash:R         rank R raises RuntimeError without a vote, the others wait in a collective
exit:R          rank R ends without a word
hang            every rank waits in a collective that never completes
busy            every rank works on and hears no cancellation
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from comfy_wan_dist.ipc.errors import ConfigError, JobCancelled, MeshError, ModelFileError
from comfy_wan_dist.ipc.messages import DecodeRequest, LedgerLine, Request
from comfy_wan_dist.mesh.degrees import MeshDegrees
from workers.checkpoint.files import ModelFiles
from workers.job import Job, JobStats

STEP_S = 0.05


class StubRunner:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def run(self, request: Request, job: Job) -> JobStats:
        assert isinstance(request, DecodeRequest)
        action, _, argument = request.vae.path.partition(":")
        getattr(self, action)(argument, job)
        if self.rank == 0:
            job.tensor(request.result).copy_(job.tensor(request.latent) + 1)
        line = LedgerLine(op="echo", axis="tp", dtype="float32", calls=1, bytes=4)
        return JobStats(bytes_read=7, ledger=(line,))

    def echo(self, _: str, job: Job) -> None:
        total = dist.get_world_size()
        if total > 1:
            value = torch.tensor([self.rank])
            dist.all_reduce(value)
            assert value.item() == total * (total - 1) // 2

    def sleep(self, steps: str, job: Job) -> None:
        for step in range(int(steps)):
            time.sleep(STEP_S)
            job.report("sample", step + 1, int(steps))
            if job.agree_stop():
                raise JobCancelled("stopped")

    def config(self, rank: str, job: Job) -> None:
        failed = self.rank == int(rank)
        job.agree(ModelFileError(f"bad shard on rank {rank}") if failed else None)

    def odd(self, rank: str, job: Job) -> None:
        job.agree(KeyError("odd") if self.rank == int(rank) else None)

    def same(self, _: str, job: Job) -> None:
        raise MeshError("the same everywhere")

    def lonely(self, rank: str, job: Job) -> None:
        if self.rank == int(rank):
            raise ConfigError("seen by one rank only")
        job.agree_stop()

    def crash(self, rank: str, job: Job) -> None:
        if self.rank == int(rank):
            raise RuntimeError("out of luck")
        self.hang("", job)

    def exit(self, rank: str, job: Job) -> None:
        if self.rank == int(rank):
            os._exit(3)
        self.hang("", job)

    def hang(self, _: str, job: Job) -> None:
        # Rank 0 waits for a message that nobody sends; the others wait in turn for theirs.
        dist.recv(torch.zeros(1), src=(self.rank + 1) % dist.get_world_size())

    def busy(self, seconds: str, job: Job) -> None:
        time.sleep(float(seconds or 3600))


def build(
    *, degrees: MeshDegrees, rank: int, local_ranks: int, device: torch.device, files: ModelFiles
) -> StubRunner:
    return StubRunner(rank)


def build_fails(
    *, degrees: MeshDegrees, rank: int, local_ranks: int, device: torch.device, files: ModelFiles
) -> StubRunner:
    if rank == degrees.plane_size - 1:
        raise RuntimeError("this rank cannot start")
    return StubRunner(rank)


def build_slowly(
    *, degrees: MeshDegrees, rank: int, local_ranks: int, device: torch.device, files: ModelFiles
) -> StubRunner:
    time.sleep(3600)
    return StubRunner(rank)
