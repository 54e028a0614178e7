"""What ranks of the test pool do with quantised files: load them beside plain ones of the same values, and sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rank_programs import load_shard
from torch import Tensor

from comfy_wan_dist.ipc.messages import ModelSpec
from devtools.mesh_runs import Inputs, Schedule, forward_rank, mesh_degrees, sample_rank
from workers.model.wan import WanModel
from workers.parallel.groups import PlaneGroups
from workers.quant.packed import PackedWeight, packed_weights


@dataclass(frozen=True, kw_only=True)
class Shard:
    """How a rank's quantised shard compares with the plain one.

    different: names of modules whose weights or biases are not equal. held, read: bytes.
    """

    different: tuple[str, ...]
    packed: int
    held: int
    read: int


def compare_shards(
    rank: int, mesh: str, pairs: Sequence[tuple[ModelSpec, ModelSpec]]
) -> list[Shard]:
    """Of each pair of a quantised file and a plain one of the same values, this rank's shard. Without fsdp."""
    degrees = mesh_degrees(mesh)
    plane = PlaneGroups(layout=degrees, rank=rank)
    shards = []
    for quantised, plain in pairs:
        model, read = load(quantised, plane)
        expected, _ = load(plain, plane)
        modules = dict(expected.named_modules())
        different = [
            f"{name}.{leaf}"
            for name, module in model.named_modules()
            if not isinstance(module, PackedWeight)
            for leaf in ("weight", "bias", "modulation")
            if isinstance(getattr(module, leaf, None), Tensor)
            and not same(getattr(module, leaf), getattr(modules[name], leaf))
        ]
        shards.append(
            Shard(
                different=tuple(different),
                packed=sum(isinstance(module, PackedWeight) for module in model.modules()),
                held=sum(p.untyped_storage().nbytes() for p in model.parameters()),
                read=read,
            )
        )
    return shards


def same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


def load(spec: ModelSpec, plane: PlaneGroups) -> tuple[WanModel, int]:
    return load_shard(plane, spec.path, dtype=getattr(torch, spec.dtype))


def matrices(rank: int, mesh: str, specs: Sequence[ModelSpec]) -> list[dict[str, Tensor]]:
    """The matrices of each file by name, unpacked or as wide as they are."""
    degrees = mesh_degrees(mesh)
    plane = PlaneGroups(layout=degrees, rank=rank)
    models = (load(spec, plane)[0] for spec in specs)
    return [
        {
            **{name: weight().clone() for name, weight in packed_weights(model).items()},
            **{
                name: parameter.detach().clone()
                for name, parameter in model.named_parameters()
                if parameter.dim() == 2 and name.endswith("weight")
            },
        }
        for model in models
    ]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Velocities of a quantised file and of a plain one, and on rank 0 what sampling with the first makes."""

    quantised: Tensor
    plain: Tensor
    latent: Tensor


def sample_pair(
    rank: int, mesh: str, pair: tuple[ModelSpec, ModelSpec], inputs: Inputs, schedule: Schedule
) -> Sampled:
    quantised, plain = velocities(rank, mesh, pair, inputs)
    latent, *_ = sample_rank(rank, mesh, pair[0], inputs, schedule)
    return Sampled(quantised=quantised, plain=plain, latent=latent)


def velocities(
    rank: int, mesh: str, specs: Sequence[ModelSpec], inputs: Inputs, backend: str | None = None
) -> list[Tensor]:
    """One forward of each file."""
    return [forward_rank(rank, mesh, spec, inputs, backend).velocity for spec in specs]


def first_columns_on_every_rank() -> AbstractContextManager[Any]:
    """Every rank takes the columns that its blocks begin with for its own."""
    original = PackedWeight.__init__

    def unskipped(self: PackedWeight, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.skipped = 0

    return mock.patch.object(PackedWeight, "__init__", unskipped)


def no_scale() -> AbstractContextManager[Any]:
    original = PackedWeight.forward

    def unscaled(self: PackedWeight) -> Tensor:
        if self.scale is not None:
            self.scale.fill_(1)
        return original(self)

    return mock.patch.object(PackedWeight, "forward", unscaled)
