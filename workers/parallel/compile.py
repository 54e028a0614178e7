"""torch.compile, one block at a time, with the collectives outside of the graphs.

Each collective is a graph break: the ledger's counts are Python state, which a traced collective would either miss
or be recompiled for at every call. The compiler is loaded only here; importing it costs a rank seconds.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import torch

from workers.model.wan import WanModel

from .collectives import AxisGroup
from .groups import MeshGroups


def outside_graphs(groups: MeshGroups) -> MeshGroups:
    """The same groups for a model that will be compiled; build the model with them."""

    def opaque(group: AxisGroup) -> AxisGroup:
        values = {field.name: getattr(group, field.name) for field in fields(group)}
        return _opaque_group()(**values)

    return replace(
        groups,
        pp=opaque(groups.pp),
        ring=opaque(groups.ring),
        ulysses=opaque(groups.ulysses),
        cp=opaque(groups.cp),
        tp=opaque(groups.tp),
    )


def compile_blocks(model: WanModel, *, backend: str = "inductor") -> None:
    """Compile every block in place. They share their code, so that the first block's graphs serve all."""
    for block in model.blocks.values():
        block.compile(backend=backend)


@functools.cache
def _opaque_group() -> type[AxisGroup]:
    class OpaqueAxisGroup(AxisGroup):
        all_reduce_sum = torch.compiler.disable(AxisGroup.all_reduce_sum)
        all_to_all = torch.compiler.disable(AxisGroup.all_to_all)
        all_gather = torch.compiler.disable(AxisGroup.all_gather)
        send = torch.compiler.disable(AxisGroup.send)
        receive = torch.compiler.disable(AxisGroup.receive)
        broadcast = torch.compiler.disable(AxisGroup.broadcast)
        gather_rows = torch.compiler.disable(AxisGroup.gather_rows)
        reduce_scatter_rows = torch.compiler.disable(AxisGroup.reduce_scatter_rows)
        pass_on = torch.compiler.disable(AxisGroup.pass_on)

    return OpaqueAxisGroup
