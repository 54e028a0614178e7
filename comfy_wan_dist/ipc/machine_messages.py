"""The messages between the machines of a group; messages.py has their JSON form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrive:
    """First message of another machine to the head. name: its host name."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """What the machine is to start as number `machine` of `machines`.

    ranks, device: how many processes, and whether they need a CUDA device each ("cuda") or none ("cpu").
    store_port: of torch's store, on the host that the machine has reached. token: what its ranks show to the head.
    """

    machine: int
    machines: int
    ranks: int
    device: str
    mesh: str
    runner: str
    store_port: int
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """Why the sender takes no part, or no longer does; the connection's last message."""

    reason: str
