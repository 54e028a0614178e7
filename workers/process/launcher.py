"""Runs this machine's torchrun agent of a group; its command line is that of LauncherOptions.

Covered: rendezvous over a file, and with several machines over torch's store on the head's address
alone, instead of torchrun's own ways, which listen on every interface and in part unpickle what
they read; the end of everything, private folder included, when the client goes away: ComfyUI's
process, on other machines the one of `worker --join` (the lifeline, a pipe that only the client
holds open). Not covered: restarts, because ComfyUI's process starts a fresh group.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from comfy_wan_dist.ipc.launch_options import LauncherOptions
from comfy_wan_dist.ipc.paths import AGENT_STORE_NAME, LOG_FOLDER_NAME

from .process_tree import kill_descendants

if TYPE_CHECKING:
    import torch.distributed as dist

RENDEZVOUS = "wan-dist"
AGENT_PREFIX = "agents"
MONITOR_INTERVAL_S = 0.1
WATCH_INTERVAL_S = 0.1
# ComfyUI's process gives up a start before.
STORE_TIMEOUT = timedelta(minutes=30)

logger = logging.getLogger(__name__)


def main() -> int:
    """Exit status: 0 if all ranks ended well."""
    options = LauncherOptions.parse()
    # Before torch, whose import takes seconds.
    watcher = threading.Thread(
        target=watch_lifeline,
        args=(options.lifeline, options.client, options.folder),
        name="lifeline",
        daemon=True,
    )
    watcher.start()
    logging.basicConfig(level=logging.INFO, format="[launcher] %(levelname)s %(message)s")
    # Shared out, unless the user has decided; torchrun would give each rank one.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.ranks)))
    os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}] "
    try:
        return run_agent(options)
    finally:
        # The group is over, also when this happens because ComfyUI is.
        shutil.rmtree(options.folder, ignore_errors=True)


def run_agent(options: LauncherOptions) -> int:
    """Start the ranks and wait for their end."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    register_rendezvous(
        lambda: agent_store(options), machine=options.machine, machines=options.machines
    )
    agent_options = [
        f"--nnodes={options.machines}",
        f"--nproc-per-node={options.ranks}",
        "--max-restarts=0",
        f"--monitor-interval={MONITOR_INTERVAL_S}",
        f"--rdzv-backend={RENDEZVOUS}",
        "--rdzv-id=group",
        "--rdzv-endpoint=127.0.0.1",
        "--local-addr=127.0.0.1",
        "--tee=3",
        f"--log-dir={options.folder / LOG_FOLDER_NAME}",
    ]
    try:
        rank_options = options.for_ranks().argv()
        torchrun([*agent_options, "-m", "workers.process.main", *rank_options])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        logger.error("rank %d ended with status %d; the group ends", rank, failure.exitcode)
        return 1
    return 0


def agent_store(options: LauncherOptions) -> dist.Store:
    """What the group's agents meet over: a file, or torch's store, which runs in the head's agent."""
    import torch.distributed as dist

    address = options.store
    if address is None:
        return dist.FileStore(str(options.folder / AGENT_STORE_NAME), -1)
    # On the socket that ComfyUI's process made: left to itself torch listens on every interface.
    store = dist.TCPStore(
        address.host,
        address.port,
        is_master=options.machine == 0,
        wait_for_workers=False,
        master_listen_fd=options.store_listener,
        timeout=STORE_TIMEOUT,
    )
    return dist.PrefixStore(AGENT_PREFIX, store)


def register_rendezvous(
    build_store: Callable[[], dist.Store], *, machine: int, machines: int
) -> None:
    """Make RENDEZVOUS known to torchrun: agents whose number and store are settled before they start."""
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    class SettledRendezvous(RendezvousHandler):
        """What torchrun asks of a rendezvous, for agents that neither come late nor return."""

        @property
        def use_agent_store(self) -> bool:
            return False

        def get_backend(self) -> str:
            return RENDEZVOUS

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(
                build_store(), machine, machines, RendezvousStoreInfo("127.0.0.1", 0)
            )

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return "group"

        def shutdown(self) -> bool:
            return True

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return SettledRendezvous()

    rendezvous_handler_registry.register(RENDEZVOUS, create)


def watch_lifeline(lifeline: int, client: int, folder: Path) -> None:
    """Wait until ComfyUI (pid `client`) ends or lets go of the pipe, then end the ranks and this process at once.

    The pipe alone may not tell: what ComfyUI forks in C, without an exec, keeps its end open.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    while os.getppid() == client and not poll.poll(WATCH_INTERVAL_S * 1000):
        pass
    try:
        # A rank may be starting this moment: look again until none is left. One that slips through
        # finds no socket.
        while kill_descendants():
            time.sleep(0.02)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    logging.shutdown()
    # Taking torch down module by module would take seconds.
    os._exit(status)
