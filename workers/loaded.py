"""A transformer as one rank holds it between jobs, and its fitting to a job."""

from __future__ import annotations

from dataclasses import dataclass

from comfy_wan_dist.mesh.shards import TokenShards

from .model.wan import WanModel
from .parallel.compile import compile_blocks
from .parallel.context import apply_context_parallel
from .parallel.groups import MeshGroups
from .parallel.sequence import SequenceParallel, apply_sequence_parallel


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """`sequence` is there if the mesh has sp."""

    model: WanModel
    sequence: SequenceParallel | None

    def fit_to(self, shards: TokenShards, groups: MeshGroups) -> None:
        """Prepare the layers for a job whose tokens are cut as `shards` says."""
        apply_context_parallel(self.model, groups, shards.cp)
        if self.sequence is not None:
            self.sequence.sizes = shards.sp.sizes


def finish_model(
    model: WanModel, groups: MeshGroups, *, compile_backend: str | None
) -> LoadedModel:
    """What is applied after the weights are there: sequence parallelism, then compilation."""
    sequence = apply_sequence_parallel(model, groups.tp) if groups.degrees.sp else None
    if compile_backend is not None:
        compile_blocks(model, backend=compile_backend)
    return LoadedModel(model=model, sequence=sequence)
