"""What requests for a transformer have in common: the groups of their mesh, and the conditions of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import COND, UNCOND, Condition, TensorRef, TransformerRequest
from comfy_wan_dist.mesh.degrees import parse_mesh
from comfy_wan_dist.mesh.layout import job_ranks

from .parallel.compile import outside_graphs
from .parallel.groups import MeshGroups, PlaneGroups
from .resident.ropes import RopeTables
from .resident.transformers import Transformers


@dataclass(frozen=True, kw_only=True)
class TransformerWork:
    """What one rank does its plane's requests for a transformer with."""

    plane: PlaneGroups
    transformers: Transformers
    device: torch.device
    ropes: RopeTables = field(default_factory=RopeTables)


def groups_for(request: TransformerRequest, plane: PlaneGroups) -> MeshGroups:
    """Groups of the request's mesh. Collectives: the making of groups that no earlier job needed.

    Raises ConfigError, MeshError, on all ranks alike, as what they see is the same.
    """
    degrees = parse_mesh(request.mesh)
    if degrees is None:
        raise ConfigError("a job's mesh is auto; name one")
    job_ranks(plane.layout, degrees)
    groups = plane.for_mesh(degrees)
    return outside_graphs(groups) if request.model.compile else groups


def read_conditions(
    conditions: Sequence[Condition], tensor: Callable[[TensorRef], Tensor]
) -> Mapping[str, Mapping[str, Tensor]]:
    """The conditions of each branch by name, their samples in dim 0. Raises ConfigError."""
    named = [(each.branch, each.name) for each in conditions]
    for each in conditions:
        if not 0 <= each.batch_dim < max(1, len(each.tensor.shape)):
            raise ConfigError(
                f"the samples of {each.name} are said to lie in dim {each.batch_dim} of {list(each.tensor.shape)}"
            )
    if len(set(named)) < len(named) or not {branch for branch, _ in named} <= {COND, UNCOND}:
        raise ConfigError(
            f"the conditions are {named}; each must be of {COND} or {UNCOND}, and of one name only once"
        )
    return {
        branch: {
            each.name: tensor(each.tensor).movedim(each.batch_dim, 0)
            for each in conditions
            if each.branch == branch
        }
        for branch in (COND, UNCOND)
    }
