"""How a model becomes parallel: which axes stay out of compiled graphs, and the order of the steps."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from comfy_wan_dist.mesh.degrees import AXES, MeshDegrees
from comfy_wan_dist.mesh.dtypes import PACKINGS
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.shards import token_shards
from devtools.mesh_runs import CPU, single_groups
from workers.model.wan import Block, softmax_attention
from workers.parallel.collectives import AxisGroup, Ledger
from workers.parallel.compile import outside_graphs
from workers.parallel.context import UlyssesAttention
from workers.parallel.parallelize import cut_model, finish_model
from workers.parallel.sequence import SequenceParallel
from workers.parallel.tensor import RowParallelLinear
from workers.quant.packed import packed_weights

SHAPE = WanShape(
    dim=512, ffn_dim=1024, num_layers=2, in_dim=48, out_dim=48, text_dim=64, freq_dim=128
)


def two_ranks(axis: str) -> AxisGroup:
    return AxisGroup(axis=axis, ranks=(0, 1), rank=1, group=None, ledger=Ledger())


def test_every_axis_and_every_collective_stays_out_of_graphs() -> None:
    groups = single_groups()
    opaque = outside_graphs(groups)
    assert groups.axes().keys() == opaque.axes().keys() >= {*AXES, "cp", "fsdp"}
    collectives = [
        name for name, member in vars(AxisGroup).items() if callable(member) and name[0] != "_"
    ]
    assert {"all_reduce_sum", "all_to_all", "exchange", "pass_on"} <= {*collectives}
    for name, group in opaque.axes().items():
        original = groups.axes()[name]
        for field in fields(group):
            assert getattr(group, field.name) is getattr(original, field.name)
        for collective in collectives:
            member = getattr(type(group), collective)
            assert member is not getattr(AxisGroup, collective), f"{collective} on {name}"
            assert getattr(member, "_torchdynamo_disable", False), f"{collective} on {name}"
    assert (opaque.degrees, opaque.ledger) == (groups.degrees, groups.ledger)


@pytest.mark.parametrize("encoding", ["Q4_K", "F8_E4M3"])
def test_model_is_staged_cut_packed_and_given_memory(encoding: str) -> None:
    """Packing must find the shapes that tp leaves: a rank's part begins inside a block of 256 columns or not."""
    packed = tuple(
        (name, PACKINGS[encoding])
        for name, size in expected_parameters(SHAPE).items()
        if len(size) == 2 and size[1] % 256 == 0
    )
    groups = replace(single_groups(), pp=two_ranks("pp"), tp=two_ranks("tp"))
    shape = replace(SHAPE, packed=packed)
    model = cut_model(shape, groups, dtype=torch.bfloat16, device=CPU)
    assert list(model.blocks) == ["1"]
    assert not hasattr(model, "patch_embedding")
    assert {each.device for each in model.parameters()} == {CPU}
    block: Any = model.blocks["1"]
    assert isinstance(block.self_attn.o, RowParallelLinear)
    assert block.ffn[0].out_features == 512
    weights = packed_weights(model)
    assert {"blocks.1.ffn.0.weight", "blocks.1.self_attn.o.weight"} <= weights.keys()
    # Row cut: the second half of 512 columns, on rank 1.
    assert tuple(block.self_attn.o.weight.shape) == (512, 256)
    assert weights["blocks.1.self_attn.o.weight"].stored.start == PACKINGS[encoding].row_bytes(256)
    assert tuple(block.ffn[0].weight.shape) == (512, 512)
    assert block.ffn[0].weight.dtype == torch.bfloat16


def test_model_is_compiled_last_and_fitted_to_each_job() -> None:
    groups = replace(
        single_groups(), degrees=MeshDegrees(ulysses=2, tp=2, sp=True), tp=two_ranks("tp")
    )
    model = cut_model(SHAPE, groups, dtype=torch.float32, device=CPU)
    hooks: list[int] = []

    def compiled(self: Block, *, backend: str) -> None:
        hooks.append(len(self.self_attn._forward_pre_hooks))

    with mock.patch.object(Block, "compile", compiled):
        parallel = finish_model(model, groups, compile_backend="eager")
    assert hooks == [1, 1]
    assert isinstance(parallel.sequence, SequenceParallel)

    job_groups = replace(groups, ulysses=two_ranks("ulysses"))
    for tokens in (24, 27):
        shards = token_shards(tokens, cp=(2, 1), sp=(2, 1))
        parallel.fit_to(shards, job_groups)
        assert parallel.sequence.sizes == shards.sp.sizes
        for block in model.blocks.values():
            assert isinstance(block, Block)
            assert isinstance(block.self_attn.attention, UlyssesAttention)
            assert block.self_attn.attention.sizes == shards.cp.sizes
    parallel.fit_to(token_shards(24, cp=(1, 0), sp=(2, 1)), groups)
    attentions = {cast(Block, block).self_attn.attention for block in model.blocks.values()}
    assert attentions == {softmax_attention}
