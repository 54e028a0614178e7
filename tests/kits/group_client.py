"""A client to be killed: starts a group of two stub ranks and says how far it is.

    python tests/kits/group_client.py LOG MOMENT [HEAD]

MOMENT is where it stays for ever: launched, hello, idle, forked (idle, with a child that has copies of its
descriptors for 20 s), execed (likewise, and then this process becomes another program), job, stuck; or leased, where it
waits for an interrupt and ends as ComfyUI does, before which a child of it has done so. It prints "there" then. With
HEAD (HOST:PORT) there is one rank here and one on another machine.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from group_kit import ask, stub_request, stub_spec

from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.default import default_groups
from comfy_wan_dist.group.launch import StartingGroup
from comfy_wan_dist.ipc.tcp import parse_address
from comfy_wan_dist.mesh.machines import Machines
from devtools.leasing import leased, lone_parcel, run_blocking


def main(log: Path, moment: str, head: str | None = None) -> None:
    build = "build_slowly" if moment == "hello" else "build"
    spec = stub_spec(log, build=build)
    if head is not None:
        spec = stub_spec(log, ranks=1, machines=Machines(count=2, head=parse_address(head)))
    if moment == "leased":
        with leased(default_groups().registry, spec) as group:
            child = os.fork()
            if child == 0:
                atexit._run_exitfuncs()
                os._exit(0)
            os.waitpid(child, 0)
            ask(group, "echo")
            with contextlib.suppress(KeyboardInterrupt):
                stay()
        return
    starting = StartingGroup(spec)
    if moment == "launched":
        stay()
    if moment == "hello":
        waiting = threading.Thread(target=starting.wait_ready, args=(threading.Event(),))
        waiting.start()
        while not starting._processes.ranks:
            time.sleep(0.001)
        stay()
    group = WorkerGroup(starting.wait_ready(threading.Event()))
    if moment in ("forked", "execed") and os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    if moment in ("idle", "forked"):
        stay()
    if moment == "execed":
        print("there", flush=True)
        os.execvp("sleep", ["sleep", "3600"])
    with lone_parcel() as parcel:
        request = stub_request(parcel, {"job": "sleep:2000", "stuck": "hang"}[moment])
        told = threading.Timer(0.5, lambda: print("there", flush=True))
        told.start()
        run_blocking(group, request, parcel)


def stay() -> None:
    print("there", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
