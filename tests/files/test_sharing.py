"""A machine reads each byte of a model file once, and every rank has its part all the same.

Covered on the CPU over gloo: tensor-parallel cuts by rows and columns, replicas, stages, fsdp and machines, against
slices of the tensors that were written; broken exchanges are noticed; trouble on one rank is heard on all, and the
group goes on. Not covered: CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import sharing_programs as programs
import torch
from rank_programs import Fault
from safetensors.torch import save_file
from sharing_programs import Load, load_together, load_with_trouble
from torch import Tensor

from comfy_wan_dist.mesh.layout import coordinates
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.header import read_model_file
from devtools.checkpoints import transformer_weights
from devtools.mesh_runs import (
    CASES,
    Schedule,
    mesh_degrees,
    model_spec,
    relative_error,
    sample_rank,
)
from devtools.rank_pool import RankPool
from workers.checkpoint.sharing import MILESTONES, in_sections

SHAPE = WanShape(dim=512, ffn_dim=768, num_layers=2, in_dim=48, out_dim=48, text_dim=64)
EULER = Schedule(solver="euler", sigmas=(1.0, 0.5, 0.0), guidance=1.0)
# Cut by rows and by columns, by whoever holds it.
ROWS = (
    *(f"{attention}.{part}" for attention in ("self_attn", "cross_attn") for part in "qkv"),
    "ffn.0",
    "norm_q",
    "norm_k",
)
COLUMNS = ("self_attn.o", "cross_attn.o", "ffn.2")


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return transformer_weights(SHAPE, seed=6, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    path = tmp_path_factory.mktemp("sharing") / "m.safetensors"
    save_file(weights, path)
    return path


def expected(name: str, whole: Tensor, *, tp: int, rank: int, rows: range) -> Tensor:
    """Written down once more, without the sharding plan."""
    layer, _, leaf = name.removeprefix("blocks.0.").removeprefix("blocks.1.").rpartition(".")
    part = whole
    if name.startswith("blocks.") and tp > 1:
        if layer.endswith(ROWS):
            part = whole.chunk(tp, dim=0)[rank]
        elif layer.endswith(COLUMNS) and leaf == "weight":
            part = whole.chunk(tp, dim=1)[rank]
    return part[rows.start : rows.stop]


def is_whole_in_a_block(name: str) -> bool:
    layer, _, leaf = name.rpartition(".")
    is_cut = layer.endswith(ROWS) or (layer.endswith(COLUMNS) and leaf == "weight")
    return name.startswith("blocks.") and not is_cut


def differing(mesh: str, weights: Mapping[str, Tensor], loads: list[Load]) -> set[str]:
    degrees = mesh_degrees(mesh)
    return {
        name
        for rank, load in enumerate(loads)
        for name, (part, rows) in load.parameters.items()
        if not torch.equal(
            part,
            expected(
                name,
                weights[name],
                tp=degrees.tp,
                rank=coordinates(degrees, rank)["tp"],
                rows=rows,
            ).to(part.dtype),
        )
    }


@pytest.mark.parametrize(
    "mesh", ["tp2", "tp4", "ulysses2", "cfg2-tp2", "ring2-fsdp", "cfg2-tp2-fsdp", "tp2-sp"]
)
def test_each_byte_is_read_once_and_all_parts_are_right(
    mesh: str, path: Path, weights: dict[str, Tensor], rank_pool: RankPool
) -> None:
    loads = rank_pool.run(mesh_degrees(mesh).world_size, load_together, mesh, str(path))
    assert differing(mesh, weights, loads) == set()
    values = sum(entry.size for entry in read_model_file(str(path)).entries.values())
    again = 0
    if mesh_degrees(mesh).fsdp:  # the same rows of what tp does not cut
        again = (mesh_degrees(mesh).tp - 1) * sum(
            each.nbytes for name, each in weights.items() if is_whole_in_a_block(name)
        )
    assert sum(load.bytes_read for load in loads) == values + again
    # Nobody does it all: the largest tensor is a twelfth of this file.
    assert max(load.bytes_read for load in loads) < values * (1 / len(loads) + 0.2)


def test_stages_read_what_is_theirs(
    path: Path, weights: dict[str, Tensor], rank_pool: RankPool
) -> None:
    loads = rank_pool.run(4, load_together, "pp2-tp2", str(path))
    assert differing("pp2-tp2", weights, loads) == set()
    both = loads[0].parameters.keys() & loads[2].parameters.keys()
    assert both == {name for name in weights if name.startswith(("text_", "time_"))}
    twice = sum(weights[name].nbytes for name in both)
    read = sum(load.bytes_read for load in loads)
    assert read == sum(each.nbytes for each in weights.values()) + twice


@pytest.mark.parametrize("mesh", ["ulysses4", "ring2-tp2", "tp4"])
def test_each_machine_reads_for_itself(
    mesh: str, path: Path, weights: dict[str, Tensor], rank_pool: RankPool
) -> None:
    loads = rank_pool.run(4, _on_two_machines, mesh, str(path))
    assert differing(mesh, weights, loads) == set()
    values = sum(each.nbytes for each in weights.values())
    for machine in (loads[:2], loads[2:]):
        read = sum(load.bytes_read for load in machine)
        if mesh == "tp4":  # what is cut by columns is passed over by each of the two
            assert values / 2 < read < 1.5 * values
        else:
            assert read == values


def test_a_machine_may_have_part_of_a_tensor_parallel_group(
    path: Path, weights: dict[str, Tensor], rank_pool: RankPool
) -> None:
    """The middle one of three groups lies on both machines, so that a rank and its replica differ in their peers."""
    loads = rank_pool.run(6, _on_two_machines, "ring3-tp2", str(path), timeout_s=30)
    assert differing("ring3-tp2", weights, loads) == set()


def _on_two_machines(rank: int, mesh: str, path: str) -> Load:
    return load_together(rank, mesh, path, machines=2)


@pytest.mark.parametrize(
    ("fault", "mesh", "layers"),
    [
        (programs.no_broadcast, "ulysses2", ("blocks.0.ffn.0.weight",)),
        (programs.columns_of_the_neighbour, "tp2", ("blocks.1.ffn.2.weight",)),
        (programs.rows_of_the_first_on_all, "tp2", ("blocks.0.self_attn.o.weight",)),
    ],
)
def test_broken_exchange_is_noticed(
    fault: Fault,
    mesh: str,
    layers: tuple[str, ...],
    path: Path,
    weights: dict[str, Tensor],
    rank_pool: RankPool,
) -> None:
    loads = rank_pool.run(2, _with_fault, mesh, str(path), fault)
    assert set(layers) <= differing(mesh, weights, loads)


def _with_fault(rank: int, mesh: str, path: str, fault: Fault) -> Load:
    return load_together(rank, mesh, path, fault=fault)


@pytest.mark.parametrize("trouble", ["stop", "read", "odd"])
@pytest.mark.parametrize(("mesh", "troubled"), [("tp2", 1), ("cfg2-tp2", 2), ("pp2", 0)])
def test_trouble_of_one_rank_is_heard_on_all_and_the_next_job_runs(
    mesh: str, troubled: int, trouble: str, path: Path, rank_pool: RankPool
) -> None:
    spec = model_spec(path)
    inputs = CASES[0].inputs(SHAPE, is_guided=mesh.startswith("cfg"))
    ranks = mesh_degrees(mesh).world_size
    # The told rank must be the one that reports, to know how far it is.
    who = 0 if trouble == "stop" else troubled
    answers = rank_pool.run(ranks, load_with_trouble, mesh, spec, inputs, EULER, who, trouble)
    words = {
        "stop": "JobCancelled: the job was stopped while the model was loading",
        "read": f"ModelFileError: {path} cannot be read: Input/output error",
        "odd": f"RemoteError: rank {troubled}: KeyError: 'odd'",
    }
    assert {first for first, _, _ in answers} == {words[trouble]}
    assert {second for _, second, _ in answers} == {"no error"}
    (alone,) = rank_pool.run(1, sample_rank, "single", spec, inputs, EULER)
    assert relative_error(answers[0][2], alone[0]) <= 1e-4


@pytest.mark.parametrize(("mesh", "exchange"), [("tp2", "all_to_all"), ("ulysses2", "broadcast")])
def test_rank_without_memory_for_an_exchange_ends_instead_of_voting(
    mesh: str, exchange: str, path: Path, rank_pool: RankPool
) -> None:
    inputs = CASES[0].inputs(SHAPE, is_guided=False)
    with pytest.raises(RuntimeError, match="OutOfStep: a shared load could not go on .* no room"):
        rank_pool.run(
            2,
            load_with_trouble,
            mesh,
            model_spec(path),
            inputs,
            EULER,
            1,
            exchange,
            timeout_s=30,
        )


@pytest.mark.parametrize("sizes", [(), (5,), (0, 0), (1, 100, 1), tuple(range(200))])
def test_every_load_has_as_many_milestones(sizes: tuple[int, ...]) -> None:
    sections = list(in_sections(sizes, lambda size: size))
    assert len(sections) == MILESTONES
    assert [size for run, _, _ in sections for size in run] == list(sizes)
    assert sections[-1][1:] == (sum(sizes), sum(sizes))
    dones = [done for _, done, _ in sections]
    assert dones == sorted(dones)
