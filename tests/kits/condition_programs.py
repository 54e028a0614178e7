"""A condition that no model has, in the three places that a new one takes: the shape, the model, and who reads it.

`shift` lies on tokens and is added to x before the patches are embedded; `more_text` is whole on every rank and is put
behind the prompt's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from comfy_wan_dist.ipc.messages import COND, UNCOND, Condition, ModelSpec, SampleRequest, TensorRef
from comfy_wan_dist.mesh.shape import ConditionKind, WanShape
from devtools.mesh_runs import Inputs, LocalJob, Schedule, build_local_runner, build_request
from workers.model.wan import TextKeysValues, WanModel


@contextmanager
def toy_conditions() -> Iterator[None]:
    """Models take `shift` and `more_text`."""
    embed, encode = WanModel.embed_patches, WanModel.encode_text

    def kinds(self: WanShape) -> tuple[ConditionKind, ...]:
        return (
            ConditionKind(name="shift", channels=self.out_dim),
            ConditionKind(name="more_text", channels=self.text_dim, on_tokens=False),
        )

    def embed_patches(self: WanModel, tokens: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return embed(self, tokens + conditions["shift"], conditions)

    def encode_text(
        self: WanModel, context: Tensor, conditions: Mapping[str, Tensor]
    ) -> tuple[TextKeysValues, ...]:
        more = conditions["more_text"]
        batch = max(len(context), len(more))
        parts = [part.expand(batch, -1, -1) for part in (context, more)]
        return encode(self, torch.cat(parts, dim=1), conditions)

    with (
        mock.patch.object(WanShape, "conditions", property(kinds)),
        mock.patch.object(WanModel, "embed_patches", embed_patches),
        mock.patch.object(WanModel, "encode_text", encode_text),
    ):
        yield


def sample_with_toys(
    rank: int,
    mesh: str,
    spec: ModelSpec,
    inputs: Inputs,
    schedule: Schedule,
    toys: Mapping[str, Mapping[str, Tensor]],
) -> Tensor:
    """The result of a run whose branches bring `toys`, by branch and name."""
    runner, agreement = build_local_runner(rank, mesh)
    request, tensors = build_request(spec, inputs, schedule, mesh=mesh)
    result = tensors[-1]
    with toy_conditions():
        request = with_toys(request, tensors, toys)
        runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
    return result


def with_toys(
    request: SampleRequest, tensors: list[Tensor], toys: Mapping[str, Mapping[str, Tensor]]
) -> SampleRequest:
    from dataclasses import replace

    conditions = []
    for branch in (COND, UNCOND):
        for name, tensor in toys[branch].items():
            tensors.append(tensor)
            ref = TensorRef(
                buffer=len(tensors) - 1, offset=0, dtype="float32", shape=tuple(tensor.shape)
            )
            conditions.append(Condition(name=name, branch=branch, tensor=ref))
    return replace(request, conditions=tuple(conditions))
