"""A pool of processes that run a function as the ranks of a gloo group.

The processes are started once and reused; each call gets a default process group of its own over a file, so that
nothing of one call is left for the next. A call that fails or hangs ends the processes it used.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    pipe: Connection


class RankPool:
    """Use as a context manager; `run` may be called with any world size, again and again."""

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch.distributed", "devtools.rank_pool", "devtools.mesh_runs"]
        )
        self._ranks: list[_Rank] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, world_size: int, function: Callable[..., T], *arguments: Any, timeout_s: float = 120
    ) -> list[T]:
        """function(rank, *arguments) on every rank; returns what the ranks return, in order.

        Raises RuntimeError with the traceback of the first rank that failed, or TimeoutError.
        """
        while len(self._ranks) < world_size:
            self._ranks.append(self._start())
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                self._ranks[rank].pipe.send(
                    (str(Path(folder) / "store"), rank, world_size, function, arguments)
                )
            deadline = time.monotonic() + timeout_s
            answers: list[Any] = [None] * world_size
            waiting = set(range(world_size))
            while waiting:
                for rank in sorted(waiting):
                    pipe = self._ranks[rank].pipe
                    if not pipe.poll(0.002):
                        continue
                    try:
                        is_ok, answer = pipe.recv()
                    except EOFError:
                        is_ok, answer = False, f"rank {rank} ended"
                    if not is_ok:
                        self.close()
                        raise RuntimeError(f"rank {rank} of {world_size} failed:\n{answer}")
                    answers[rank] = answer
                    waiting.discard(rank)
                if time.monotonic() > deadline:
                    self.close()
                    raise TimeoutError(
                        f"ranks {sorted(waiting)} of {world_size} did not answer in {timeout_s} s"
                    )
        return answers

    def close(self) -> None:
        for rank in self._ranks:
            rank.pipe.close()
        # An idle rank sees the end of its pipe and exits; one that hangs is killed.
        deadline = time.monotonic() + 5
        for rank in self._ranks:
            rank.process.join(max(0, deadline - time.monotonic()))
            rank.process.kill()
            rank.process.join(10)
        self._ranks.clear()

    def _start(self) -> _Rank:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return _Rank(process, ours)


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # jobs collect, which takes a tenth of a second over all that is imported
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with contextlib.suppress(EOFError, OSError):
        while True:
            store_path, rank, world_size, function, arguments = pipe.recv()
            try:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store_path, world_size),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=60),
                )
                answer = (True, function(rank, *arguments))
            except BaseException:
                answer = (False, traceback.format_exc())
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
            pipe.send(answer)
