"""Runs this machine's torchrun agent of a group.

    python -m workers.launcher --folder F --lifeline FD --client PID --ranks N --device cpu|cuda --mesh M
    --runner MODULE:FUNCTION
    [--machines N --store HOST:PORT (--store-listener FD | --machine K --report HOST:PORT [--models FOLDER])]

Covered: rendezvous over a file, and with several machines over torch's store on the head's address
alone, instead of torchrun's own ways, which listen on every interface and in part unpickle what
they read; the end of everything, private folder included, when the client goes away: ComfyUI's
process, on other machines the one of `worker --join` (the lifeline, a pipe that only the client
holds open). Not covered: restarts, because ComfyUI's process starts a fresh group.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from comfy_wan_dist.ipc.paths import AGENT_STORE_NAME, LOG_FOLDER_NAME
from comfy_wan_dist.ipc.tcp import Address, parse_address

if TYPE_CHECKING:
    import torch.distributed as dist

RENDEZVOUS = "wan-dist"
AGENT_PREFIX = "agents"
MONITOR_INTERVAL_S = 0.1
# ComfyUI's process gives up a start before.
STORE_TIMEOUT = timedelta(minutes=30)

logger = logging.getLogger(__name__)


def main() -> int:
    """Exit status: 0 if all ranks ended well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--client", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--runner", required=True)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--machine", type=int, default=0)
    parser.add_argument("--store", type=parse_address)
    parser.add_argument("--store-listener", type=int)
    parser.add_argument("--report", type=parse_address)
    parser.add_argument("--models", type=Path)
    arguments = parser.parse_args()

    # Before torch, whose import takes seconds.
    watcher = threading.Thread(
        target=watch_lifeline,
        args=(arguments.lifeline, arguments.client, arguments.folder),
        name="lifeline",
        daemon=True,
    )
    watcher.start()
    logging.basicConfig(level=logging.INFO, format="[launcher] %(levelname)s %(message)s")
    # Shared out, unless the user has decided; torchrun would give each rank one.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // arguments.ranks)))
    os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}] "
    try:
        return run_agent(arguments)
    finally:
        # The group is over, also when this happens because ComfyUI is.
        shutil.rmtree(arguments.folder, ignore_errors=True)


def run_agent(arguments: argparse.Namespace) -> int:
    """Start the ranks and wait for their end."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    register_rendezvous(
        lambda: agent_store(arguments), machine=arguments.machine, machines=arguments.machines
    )
    agent_options = {
        "--nnodes": str(arguments.machines),
        "--nproc-per-node": str(arguments.ranks),
        "--max-restarts": "0",
        "--monitor-interval": str(MONITOR_INTERVAL_S),
        "--rdzv-backend": RENDEZVOUS,
        "--rdzv-id": "group",
        "--rdzv-endpoint": "127.0.0.1",
        "--local-addr": "127.0.0.1",
        "--tee": "3",
        "--log-dir": str(arguments.folder / LOG_FOLDER_NAME),
    }
    rank_options = {
        "--folder": str(arguments.folder),
        "--device": arguments.device,
        "--mesh": arguments.mesh,
        "--runner": arguments.runner,
    }
    for name in ("store", "report", "models"):
        value = getattr(arguments, name)
        if value is not None:
            rank_options[f"--{name}"] = str(value)
    try:
        torchrun([*_flat(agent_options), "-m", "workers.process.main", *_flat(rank_options)])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        logger.error("rank %d ended with status %d; the group ends", rank, failure.exitcode)
        return 1
    return 0


def agent_store(arguments: argparse.Namespace) -> dist.Store:
    """What the group's agents meet over: a file, or torch's store, which runs in the head's agent."""
    import torch.distributed as dist

    address: Address | None = arguments.store
    if address is None:
        return dist.FileStore(str(arguments.folder / AGENT_STORE_NAME), -1)
    # On the socket that ComfyUI's process made: left to itself torch listens on every interface.
    store = dist.TCPStore(
        address.host,
        address.port,
        is_master=arguments.machine == 0,
        wait_for_workers=False,
        master_listen_fd=arguments.store_listener,
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

    The pipe alone does not tell: whatever ComfyUI forks without an exec keeps its end open.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    with contextlib.suppress(ProcessLookupError):
        poll.register(os.pidfd_open(client), select.POLLIN)
        if os.getppid() == client:
            poll.poll()
    # A rank may be starting this moment: look again until none is left. One that slips through
    # finds no socket.
    while kill_descendants():
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def kill_descendants() -> int:
    """SIGKILL every process below this one, by pidfd, so never a stranger; how many it were."""
    killed = 0
    for pid in descendants(os.getpid()):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            # Still below us now that its number cannot be reused.
            if pid in descendants(os.getpid()):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed += 1
        except OSError:
            pass
        finally:
            os.close(pidfd)
    return killed


def descendants(ancestor: int) -> set[int]:
    """Living processes below `ancestor`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            status = Path("/proc", entry, "stat").read_bytes()
        except OSError:
            continue
        state, parent = status.rpartition(b")")[2].split()[:2]
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(entry))
    found: set[int] = set()
    below = [ancestor]
    while below:
        for child in children.get(below.pop(), []):
            if child not in found:
                found.add(child)
                below.append(child)
    return found


def _flat(options: dict[str, str]) -> list[str]:
    return [part for pair in options.items() for part in pair]


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    logging.shutdown()
    # Taking torch down module by module would take seconds.
    os._exit(status)
