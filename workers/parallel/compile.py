"""torch.compile, one block at a time, with the collectives outside of the graphs.

Each collective is a graph break: the ledger's counts are Python state, which a traced collective would either miss
or be recompiled for at every call. The compiler is loaded only here; importing it costs a rank seconds.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields, replace
from typing import Any

import torch

from comfy_wan_dist.ipc.errors import ConfigError
from workers.model.wan import WanModel

from .collectives import AxisGroup
from .groups import MeshGroups


def outside_graphs(groups: MeshGroups) -> MeshGroups:
    """The same groups for a model that will be compiled; build the model with them.

    That holds for every axis, used inside of blocks or not: outside of graphs there is nothing to break.
    """

    def opaque(group: AxisGroup) -> AxisGroup:
        values = {field.name: getattr(group, field.name) for field in fields(group)}
        return _opaque_group()(**values)

    changes: dict[str, Any] = {name: opaque(group) for name, group in groups.axes().items()}
    return replace(groups, **changes)


def compile_blocks(model: WanModel, *, backend: str = "inductor") -> None:
    """Compile every block in place. They share their code, so that the first block's graphs serve all."""
    for block in model.blocks.values():
        block.compile(backend=backend)


def require_compiler(device: torch.device) -> None:
    """Compile something small. Raises ConfigError where torch.compile does not work."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:
        raise ConfigError(
            f"torch.compile does not work here ({str(error).strip().splitlines()[0][:200]}); "
            "install a C++ compiler, let TMPDIR name a folder where programs may lie and run, or switch compile off"
        ) from error


@functools.cache
def _opaque_group() -> type[AxisGroup]:
    collectives = {
        name: torch.compiler.disable(member)
        for name, member in vars(AxisGroup).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    return type("OpaqueAxisGroup", (AxisGroup,), collectives)
