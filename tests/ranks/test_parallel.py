"""A model on a mesh is the model on one device, and every broken collective shows.

Covered on the CPU over gloo in float32: each mesh against one process, for one forward and for whole runs; the
faults of `rank_programs` against the same limits; the ledger against numbers worked out by hand and against torch's
own functions; equal residuals over the tensor-parallel ranks; compiled blocks. Not covered: CUDA and NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import rank_programs
import torch
from rank_programs import Fault
from torch import Tensor

from comfy_wan_dist.ipc.messages import LedgerLine, ModelSpec
from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.mesh_runs import (
    CASES,
    FORWARD_LIMIT,
    MANY_HEADS,
    MANY_HEADS_MESH,
    MESHES,
    RUN_LIMIT,
    SIZES,
    SOLVERS,
    TEXT_TOKENS,
    TWO_HEADS,
    Case,
    ForwardRun,
    forward_rank,
    matrix_rank,
    mesh_degrees,
    model_spec,
    relative_error,
)
from devtools.rank_pool import RankPool

TEXT, IMAGE, ODD, *_ = CASES

# Each fault with a mesh and a case in which it matters. Where an exchange is left out shards must be even.
FAULTS: tuple[tuple[Fault, str, Case], ...] = (
    (rank_programs.rank_local_norm, "tp2", TEXT),
    (rank_programs.rank_local_cross_norm, "tp2", TEXT),
    (rank_programs.row_without_sum, "tp2", TEXT),
    (rank_programs.row_bias_on_every_rank, "tp2", TEXT),
    (rank_programs.rope_from_zero, "ulysses2", ODD),
    (rank_programs.frame_rows_from_zero, "ulysses2", ODD),
    (rank_programs.all_frames_on_every_shard, "ulysses2", ODD),
    (rank_programs.no_guidance_exchange, "cfg2", TEXT),
    (rank_programs.swapped_guidance_planes, "cfg2", TEXT),
    (rank_programs.no_ulysses_input_exchange, "ulysses2", TEXT),
    (rank_programs.no_ulysses_output_exchange, "ulysses2", TEXT),
    (rank_programs.wrong_head_order, "ulysses2", TEXT),
    (rank_programs.no_final_gather, "ulysses2", TEXT),
    (rank_programs.no_ring, "ring2", TEXT),
    (rank_programs.ring_without_weights, "ring2", TEXT),
    (rank_programs.no_sequence_sum, "tp2-sp", TEXT),
    (rank_programs.no_sequence_gather, "tp2-sp", TEXT),
    (rank_programs.no_broadcast, "pp2", TEXT),
    (rank_programs.no_residual, "pp2", TEXT),
    (rank_programs.no_weight_gather, "ulysses2-fsdp", TEXT),
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("parallel") / "tiny.safetensors"
    write_transformer(path, TINY_TRANSFORMER, seed=0)
    return model_spec(path)


@pytest.fixture(scope="module")
def single(rank_pool: RankPool, spec: ModelSpec) -> dict[str, Tensor]:
    """The whole matrix of one process."""
    return rank_pool.run(1, matrix_rank, "single", spec, CASES, SOLVERS)[0]


@pytest.fixture(scope="module")
def forward(rank_pool: RankPool, spec: ModelSpec) -> Callable[..., list[ForwardRun]]:
    """forward(mesh, case, fault): one forward on all ranks; repeated calls share a result."""

    @cache
    def run(mesh: str, case: Case, fault: Fault = rank_programs.no_fault) -> list[ForwardRun]:
        return rank_pool.run(
            mesh_degrees(mesh).world_size,
            rank_programs.with_fault,
            fault,
            forward_rank,
            mesh,
            spec,
            case.inputs(TINY_TRANSFORMER),
        )

    return run


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_mesh_matches_single_process(
    mesh: str, rank_pool: RankPool, spec: ModelSpec, single: dict[str, Tensor]
) -> None:
    results = rank_pool.run(mesh_degrees(mesh).world_size, matrix_rank, mesh, spec, CASES, SOLVERS)[
        0
    ]
    cases = [case for case in CASES if case.batch >= mesh_degrees(mesh).dp]
    assert len(results) == len(cases) * (1 + len(SOLVERS)) > 0
    assert results.keys() <= single.keys()
    for row, result in results.items():
        limit = FORWARD_LIMIT if row.endswith("one forward") else RUN_LIMIT
        assert relative_error(result, single[row]) <= limit, row


@pytest.mark.parametrize(
    ("shape", "case", "mesh"),
    [
        (TWO_HEADS, SIZES[0], "ring4-ulysses2"),
        (TWO_HEADS, SIZES[1], "ring4"),
        (MANY_HEADS, ODD, MANY_HEADS_MESH),
    ],
    ids=["12090 tokens on 8", "10695 tokens on 4", "24 heads on 5"],
)
def test_sizes_that_nothing_divides_match_single_process(
    shape: WanShape, case: Case, mesh: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    write_transformer(tmp_path / "m.safetensors", shape, seed=0)
    runs = [
        rank_pool.run(
            mesh_degrees(each).world_size,
            forward_rank,
            each,
            model_spec(tmp_path / "m.safetensors"),
            case.inputs(shape),
        )[0]
        for each in ("single", mesh)
    ]
    assert relative_error(runs[1].velocity, runs[0].velocity) <= FORWARD_LIMIT


def test_every_rank_returns_the_whole_velocity(forward: Callable[..., list[ForwardRun]]) -> None:
    first, *others = forward("cfg2-ulysses2-tp2", ODD)
    for other in others:
        assert torch.equal(first.velocity, other.velocity)


@pytest.mark.parametrize(
    ("fault", "mesh", "case"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS]
)
def test_parity_check_notices(
    fault: Fault,
    mesh: str,
    case: Case,
    forward: Callable[..., list[ForwardRun]],
    single: dict[str, Tensor],
) -> None:
    expected = single[f"{case.name}, one forward"]
    assert relative_error(forward(mesh, case)[0].velocity, expected) <= FORWARD_LIMIT
    assert relative_error(forward(mesh, case, fault)[0].velocity, expected) > 100 * FORWARD_LIMIT


@pytest.mark.parametrize("mesh", ["tp2", "tp4", "ulysses2-tp2"])
def test_residuals_are_bit_identical_on_tensor_parallel_ranks(
    mesh: str, forward: Callable[..., list[ForwardRun]]
) -> None:
    runs = forward(mesh, ODD)
    tp = mesh_degrees(mesh).tp
    for first in range(0, len(runs), tp):
        # Two branches, each through every block.
        assert len(runs[first].residuals) == 2 * TINY_TRANSFORMER.num_layers
        for other in runs[first + 1 : first + tp]:
            assert all(map(torch.equal, runs[first].residuals, other.residuals))


def test_residuals_differ_on_tensor_parallel_ranks_without_the_sum(
    forward: Callable[..., list[ForwardRun]],
) -> None:
    first, other = forward("tp2", TEXT, rank_programs.row_without_sum)
    assert not any(map(torch.equal, first.residuals, other.residuals))


def line(op: str, axis: str, calls: int, bytes: int) -> LedgerLine:
    return LedgerLine(op=op, axis=axis, dtype="float32", calls=calls, bytes=bytes)


# ODD: 27 tokens of width 512 in 4 heads of 128, 2 blocks, 2 branches, 4 bytes each number.
BLOCKS, BRANCHES, ITEM = TINY_TRANSFORMER.num_layers, 2, 4


def test_ledger_of_tensor_parallel_forward(forward: Callable[..., list[ForwardRun]]) -> None:
    run = forward("tp2", ODD)[0]
    rows = 3 * 27 * 512  # self o, cross o, ffn.2
    norms = 27 * 2 + 27  # q and k of self-attention fused, q of cross-attention
    per_branch = BLOCKS * (rows + norms) * ITEM
    assert run.ledger == (line("all_reduce", "tp", BRANCHES * BLOCKS * 5, BRANCHES * per_branch),)
    text = BRANCHES * BLOCKS * TEXT_TOKENS * ITEM  # k of cross-attention, once per prompt
    assert run.text_ledger == (line("all_reduce", "tp", BRANCHES * BLOCKS, text),)


def test_ledger_of_ulysses_forward(forward: Callable[..., list[ForwardRun]]) -> None:
    for run, own in zip(forward("ulysses2", ODD), (14, 13), strict=True):
        qkv = 3 * own * 512
        output = 27 * 256  # all tokens, half of the heads
        sent = BRANCHES * BLOCKS * (qkv + output) * ITEM
        assert run.ledger == (line("all_to_all", "ulysses", BRANCHES * BLOCKS * 2, sent),)
        assert run.text_ledger == ()


def test_ledger_of_guidance_exchange(forward: Callable[..., list[ForwardRun]]) -> None:
    for run in forward("cfg2", ODD):
        assert run.ledger == (line("all_gather", "cfg", 1, 27 * 192 * ITEM),)
    run = forward("cfg2-ulysses2-tp2", ODD)[0]
    exchanges = [entry for entry in run.ledger if entry.axis == "cfg"]
    assert exchanges == [line("all_gather", "cfg", 1, 14 * 192 * ITEM)]


@pytest.mark.parametrize("mesh", ["ulysses2-tp2", "ring2", "pp2", "ulysses2-fsdp"])
def test_ledger_says_how_long_each_op_took(
    mesh: str, forward: Callable[..., list[ForwardRun]]
) -> None:
    for run in forward(mesh, ODD):
        for entry in run.ledger:
            # Loopback moves no more than 50 GB/s, and a forward of this size takes no minute.
            assert entry.bytes / 50e9 < entry.seconds < 60, entry


def test_ledger_of_single_process_is_empty(forward: Callable[..., list[ForwardRun]]) -> None:
    (run,) = forward("single", ODD)
    assert run.ledger == run.text_ledger == ()


@pytest.mark.parametrize("mesh", ["cfg2-ulysses2-tp2", "cfg2-ulysses2-tp2-fsdp"])
def test_ledger_equals_what_torch_was_asked_for(
    mesh: str, rank_pool: RankPool, spec: ModelSpec
) -> None:
    inputs = ODD.inputs(TINY_TRANSFORMER)
    answers = rank_pool.run(8, rank_programs.count_collectives, mesh, spec, inputs)
    for rank, (seen, ledger) in enumerate(answers):
        booked = {op: (0, 0) for op in seen}
        for entry in ledger:
            calls, sent = booked[entry.op]
            booked[entry.op] = (calls + entry.calls, sent + entry.bytes)
        # The gather of the result comes after the ledger was read: 14 tokens, of which one may fill up.
        calls, sent = booked["all_gather"]
        booked["all_gather"] = (calls + 1, sent + 14 * 192 * ITEM)
        assert booked == seen, rank


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", ["ulysses2-tp2", "ulysses2-fsdp"])
def test_compiled_blocks_match_and_send_the_same(
    mesh: str,
    rank_pool: RankPool,
    spec: ModelSpec,
    forward: Callable[..., list[ForwardRun]],
    single: dict[str, Tensor],
) -> None:
    compiled = rank_pool.run(
        mesh_degrees(mesh).world_size,
        rank_programs.compiled_forward,
        mesh,
        spec,
        ODD.inputs(TINY_TRANSFORMER),
        "aot_eager",
        timeout_s=240,
    )
    expected = single[f"{ODD.name}, one forward"]
    for (run, graph_count), plain in zip(compiled, forward(mesh, ODD), strict=True):
        assert graph_count > 0
        assert relative_error(run.velocity, expected) <= FORWARD_LIMIT
        assert run.ledger == plain.ledger
        assert run.text_ledger == plain.text_ledger
