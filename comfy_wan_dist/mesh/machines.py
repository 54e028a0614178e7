"""Several machines that make one plane together. ComfyUI's is number 0, the head; the others join it.

Rank r sits on machine r // ranks_per_machine: the last axes of a mesh stay inside a machine, the first cross them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ipc.errors import ConfigError, MeshError
from ..ipc.tcp import Address, parse_address
from .degrees import MeshDegrees

MAX_MACHINES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """head: where the other machines reach ComfyUI's."""

    count: int
    head: Address


def parse_machines(count: int, head_address: str) -> Machines | None:
    """The loader's two inputs; None for one machine, whose address is not read. Raises ConfigError."""
    if not 1 <= count <= MAX_MACHINES:
        raise ConfigError(f"machines is {count}; it must be from 1 to {MAX_MACHINES}")
    if count == 1:
        return None
    if not head_address.strip():
        raise ConfigError(
            f"machines is {count} but head_address is empty; write the address and a free port at which the other "
            "machines reach this one, such as 192.168.1.10:29400"
        )
    return Machines(count=count, head=parse_address(head_address))


def validate_machines(degrees: MeshDegrees, machines: Machines | None) -> None:
    """Refuse a mesh that cannot be spread over so many machines. Raises MeshError."""
    if machines is None:
        return
    if degrees.dp > 1:
        raise MeshError(
            f"mesh {degrees} has dp{degrees.dp}, but with {machines.count} machines there is one plane, "
            "which spans them all; leave dp out, or use one machine"
        )
    if degrees.world_size % machines.count:
        raise MeshError(
            f"the {degrees.world_size} ranks of mesh {degrees} do not divide by {machines.count} machines; "
            "each machine has equally many ranks: choose another mesh or number of machines"
        )
