"""The table of parameters: equal to the model, cut as Megatron cuts, and the one place that a new parameter needs.

Covered: names, shapes and dtypes against the torch model; slices; a toy family with one more parameter in each block,
which the file check, the loader, the module swap and the memory formulas take from the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh import memory, parameters
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.memory import block_bytes, weight_bytes
from comfy_wan_dist.mesh.parameters import (
    BLOCK,
    OUTER,
    Parameter,
    expected_parameters,
    float32,
    parameter_of,
    parameter_slice,
)
from comfy_wan_dist.mesh.shape import KNOWN_MODELS, WanShape
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.wan import read_wan_file
from devtools.checkpoints import TINY_TRANSFORMER, transformer_weights, write_transformer
from devtools.mesh_runs import single_groups
from devtools.reading import pass_by, read_alone
from workers.checkpoint.load import load_weights
from workers.model.wan import Block, WanModel
from workers.parallel.collectives import AxisGroup, Ledger
from workers.parallel.groups import MeshGroups
from workers.parallel.parallelize import cut_model

CPU, META = torch.device("cpu"), torch.device("meta")
SMALL = WanShape(
    dim=256, ffn_dim=640, num_layers=2, in_dim=36, out_dim=16, text_dim=64, freq_dim=128
)


def group_of(axis: str, size: int, rank: int) -> AxisGroup:
    return AxisGroup(axis=axis, ranks=tuple(range(size)), rank=rank, group=None, ledger=Ledger())


def rank_groups(*, tp: tuple[int, int] = (1, 0), pp: tuple[int, int] = (1, 0)) -> MeshGroups:
    """Size and rank of each axis, without processes."""
    return replace(single_groups(), tp=group_of("tp", *tp), pp=group_of("pp", *pp))


# ---- the table and the model


@pytest.mark.parametrize("shape", [TINY_TRANSFORMER, SMALL, *KNOWN_MODELS.values()])
def test_table_is_the_model(shape: WanShape) -> None:
    with torch.device("meta"):
        model = WanModel(shape)
    found = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert found == expected_parameters(shape)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_ranks_of_all_stages_hold_what_the_table_says(pp_size: int, tp_size: int) -> None:
    expected, found = expected_parameters(TINY_TRANSFORMER), set[str]()
    for stage in range(pp_size):
        groups = rank_groups(tp=(tp_size, tp_size - 1), pp=(pp_size, stage))
        model = cut_model(TINY_TRANSFORMER, groups, dtype=torch.bfloat16, device=META)
        held = 0
        for name, parameter in model.named_parameters():
            size = list(expected[name])
            part = parameter_slice(name, expected[name], tp_rank=0, tp_size=tp_size)
            if part is not None:
                size[part.dim] = part.stop - part.start
            assert tuple(parameter.shape) == tuple(size), name
            is_precise = "norm" in name or "modulation" in name or name.startswith("time_")
            assert parameter.dtype == (torch.float32 if is_precise else torch.bfloat16), name
            held += parameter.numel() * parameter.element_size()
        found |= {name for name, _ in model.named_parameters()}
        degrees = MeshDegrees(pp=pp_size, tp=tp_size)
        assert held == weight_bytes(TINY_TRANSFORMER, degrees, stage=stage, dtype="bfloat16")
    assert found == expected.keys()


def test_each_parameter_is_in_one_line() -> None:
    for lines in (BLOCK, OUTER):
        names = [each.name for each in lines]
        assert len(set(names)) == len(names)
    for name in expected_parameters(SMALL):
        assert name.endswith(parameter_of(name).name)


def test_table_does_not_know_other_names() -> None:
    for name in (
        "blocks.0.self_attn",
        "blocks.0.ffn.1.weight",
        "head.norm.weight",
        "blocks.0.cross_attn.k_img.weight",
        "blocks.x.ffn.0.weight",
        "blocks.0.patch_embedding.weight",
        "ffn.0.weight",
    ):
        with pytest.raises(KeyError, match="no parameter of the table"):
            parameter_of(name)


# ---- tensor parallelism


def test_table_cuts_what_megatron_cuts() -> None:
    attentions = ("self_attn", "cross_attn")
    columns = [*(f"{a}.{p}" for a in attentions for p in "qkv"), "ffn.0"]
    norms = [f"{a}.norm_{p}.weight" for a in attentions for p in "qk"]
    by_dim: dict[int | None, set[str]] = {None: set(), 0: set(), 1: set()}
    for each in BLOCK:
        by_dim[each.cut_dim].add(each.name)
    assert by_dim[0] == {f"{c}.{leaf}" for c in columns for leaf in ("weight", "bias")} | {*norms}
    rows = [*(f"{a}.o" for a in attentions), "ffn.2"]
    assert by_dim[1] == {f"{row}.weight" for row in rows}
    assert by_dim[None] == {f"{r}.bias" for r in rows} | {
        "modulation",
        "norm3.weight",
        "norm3.bias",
    }
    assert {each.cut_dim for each in OUTER} == {None}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_slices_of_all_ranks_make_the_whole_parameter(tp_size: int) -> None:
    cut_count = 0
    for name, shape in expected_parameters(TINY_TRANSFORMER).items():
        slices = [
            parameter_slice(name, shape, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)
        ]
        first = slices[0]
        if first is None:
            assert slices == [None] * tp_size
            continue
        cut_count += 1
        borders = [(part.start, part.stop) for part in slices if part is not None]
        size = shape[first.dim] // tp_size
        assert borders == [(rank * size, (rank + 1) * size) for rank in range(tp_size)]
        assert borders[-1][1] == shape[first.dim]
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        parts = [
            whole.narrow(part.dim, part.start, part.stop - part.start)
            for part in slices
            if part is not None
        ]
        assert torch.equal(torch.cat(parts, dim=first.dim), whole)
    # q, k, v: weight and bias; o, ffn.2: weight; norms; ffn.0: weight and bias.
    assert cut_count == (
        0 if tp_size == 1 else TINY_TRANSFORMER.num_layers * (2 * (6 + 1 + 2) + 2 + 1)
    )


def test_parameter_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="which tp3 does not divide"):
        parameter_slice("blocks.0.ffn.0.weight", (1024, 512), tp_rank=0, tp_size=3)


# ---- one more parameter


@pytest.fixture
def add_parameter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Parameter], None]:
    """A line more in the table, and the parameter in the model's blocks."""

    def add(line: Parameter) -> None:
        for module in (parameters, memory):
            monkeypatch.setattr(module, "BLOCK", (*BLOCK, line))
        original = Block.__init__

        def with_one_more(self: Block, dim: int, ffn_dim: int) -> None:
            original(self, dim, ffn_dim)
            shape = mock.Mock(dim=dim, ffn_dim=ffn_dim)
            setattr(self, line.name, nn.Parameter(torch.zeros(line.shape(shape))))

        monkeypatch.setattr(Block, "__init__", with_one_more)

    return add


@pytest.mark.parametrize("cut_dim", [None, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_toy_family_needs_one_line(
    add_parameter: Callable[[Parameter], None], tmp_path: Path, dtype: str, cut_dim: int | None
) -> None:
    write_transformer(tmp_path / "wan.safetensors", SMALL, seed=1)
    plain = {
        parts: block_bytes(SMALL, tp=2, parts=parts, dtype=dtype, packing=None) for parts in (1, 3)
    }
    (line,) = float32("toy", 1, "dim", cut_dim=cut_dim)
    add_parameter(line)

    # The file check
    assert expected_parameters(SMALL)["blocks.1.toy"] == (1, SMALL.dim)
    with pytest.raises(ModelFileError, match=r"lacks 2 tensors, the first is blocks\.0\.toy"):
        read_wan_file(read_model_file(str(tmp_path / "wan.safetensors")))
    weights = transformer_weights(SMALL, seed=1)
    save_file(weights, tmp_path / "toy.safetensors")
    file = read_wan_file(read_model_file(str(tmp_path / "toy.safetensors")))

    # The cut and the loader
    for rank in range(2):
        groups = rank_groups(tp=(2, rank))
        kind = getattr(torch, dtype)
        model = cut_model(file.shape, groups, dtype=kind, device=CPU)
        load_weights(model, file, groups, sharing=read_alone(), milestone=pass_by)
        value: Any = weights["blocks.1.toy"]
        if cut_dim is not None:
            value = value.chunk(2, dim=cut_dim)[rank]
        loaded: Any = model.get_parameter("blocks.1.toy")
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, value)

        # The memory formulas
        held = sum(each.numel() * each.element_size() for each in model.parameters())
        assert held == weight_bytes(SMALL, MeshDegrees(tp=2), stage=0, dtype=dtype)
    toy = 4 * SMALL.dim // (1 if cut_dim is None else 2)
    for parts, before in plain.items():  # one row is padded to one in each part
        assert block_bytes(SMALL, tp=2, parts=parts, dtype=dtype) == before + toy
