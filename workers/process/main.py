"""Start-up of one rank: report to ComfyUI, join the group, build the runner, serve.

The only module of the ranks that reads the environment. The order matters: the rank says hello and
starts its lifeline before it imports torch, so that it can be told to go from its first moments on.
A rank of another machine differs in where it reports, and where its tensors and files come from.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from comfy_wan_dist.ipc import tcp
from comfy_wan_dist.ipc.channel import SocketChannel
from comfy_wan_dist.ipc.launch_options import RankOptions
from comfy_wan_dist.ipc.messages import Hello, Ready
from comfy_wan_dist.ipc.paths import RANK_STORE_NAME, SOCKET_NAME, TOKEN_NAME
from comfy_wan_dist.ipc.tcp import Address

from .loop import Inbox, Loop

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from workers.job import Runner
    from workers.parallel.agreement import Agreement

SEND_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
# A rank may read its shard of a large model from slow storage while the others wait for its vote.
VOTE_TIMEOUT = timedelta(minutes=60)

logger = logging.getLogger("workers.process.main")  # not __main__


def main() -> int:
    """Exit status: 0 after Shutdown."""
    options = RankOptions.parse()
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])  # every machine has as many

    channel = connect(options.folder, rank, report=options.report)
    inbox = Inbox(channel)
    inbox.start()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")

    from comfy_wan_dist.mesh.degrees import parse_mesh
    from workers.checkpoint.files import CopiedFiles, GivenFiles, ModelFiles

    from .buffers import build_buffers

    degrees = parse_mesh(options.mesh)
    if degrees is None:
        raise ValueError("--mesh is auto; a group is started for a mesh with degrees")
    device, agreement = join_group(
        store=rank_store(options.folder, options.store, world_size=world_size),
        kind=options.device,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
    )
    adopt = build_buffers(
        rank=rank, head_ranks=local_ranks, world_size=world_size, agreement=agreement
    )
    files: ModelFiles = GivenFiles()
    if rank >= local_ranks:
        files = CopiedFiles(folder=options.models, machine=socket.gethostname())
    build = load_builder(options.runner)
    runner = build(degrees=degrees, rank=rank, local_ranks=local_ranks, device=device, files=files)
    loop = Loop(
        channel=channel,
        inbox=inbox,
        runner=runner,
        agreement=agreement,
        adopt=adopt,
        rank=rank,
    )
    channel.send(Ready(rank=rank, device=str(device)), timeout_s=SEND_TIMEOUT_S)
    logger.info("ready on %s", device)
    return loop.serve()


def connect(folder: Path, rank: int, *, report: Address | None) -> SocketChannel:
    """Report to ComfyUI's process, by TCP if it is on another machine. An OSError means that it has gone."""
    if report is None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(folder / SOCKET_NAME))
    else:
        connection = tcp.connect(report, timeout_s=CONNECT_TIMEOUT_S)
    channel = SocketChannel(connection)
    token = (folder / TOKEN_NAME).read_text()
    channel.send(Hello(token=token, rank=rank, pid=os.getpid()), timeout_s=SEND_TIMEOUT_S)
    return channel


def rank_store(folder: Path, address: Address | None, *, world_size: int) -> dist.Store:
    """What the ranks meet over: a file, or with several machines the agents' store."""
    import torch.distributed as dist

    if address is None:
        return dist.FileStore(str(folder / RANK_STORE_NAME), world_size)
    return dist.PrefixStore(
        RANK_STORE_NAME, dist.TCPStore(address.host, address.port, is_master=False)
    )


def join_group(
    *, store: dist.Store, kind: str, rank: int, local_rank: int, world_size: int
) -> tuple[torch.device, Agreement]:
    """Set up this rank's device and the process groups of the plane.

    The default group serves tensors of the device (NCCL or gloo) and of the CPU (gloo). Votes have
    a gloo group of their own, so that they cannot mix with a job's collectives.
    """
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    from workers.parallel.agreement import Agreement

    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world_size,
    )
    threads = torch.get_num_threads()
    # Adopts the group just made; left to itself it would open a port.
    state = PartialState(cpu=kind == "cpu")
    torch.set_num_threads(threads)
    if state.device.type != kind or (kind == "cuda" and state.device != device):
        raise RuntimeError(
            f"accelerate chose {state.device} for rank {rank}; it should be {device}"
        )
    votes = dist.new_group(backend="gloo", timeout=VOTE_TIMEOUT) if world_size > 1 else None
    return device, Agreement(rank=rank, size=world_size, group=votes)


def load_builder(name: str) -> Callable[..., Runner]:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    builder: Callable[..., Runner] = getattr(importlib.import_module(module), function)
    return builder


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    logging.shutdown()
    # No interpreter shutdown: it would wait for collectives that may never complete.
    os._exit(status)
