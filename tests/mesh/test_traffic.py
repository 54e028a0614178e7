"""Planned against counted: every collective of every mesh, and the numbers that papers give.

The counted side is the ledger of real runs of the whole pipeline on a tiny model; the planned side has never seen a
tensor. FLOPs are compared with what torch's own counter sees, activations with the storages that live.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from live_bytes import LiveBytes
from torch.utils.flop_counter import FlopCounterMode

from comfy_wan_dist.ipc.messages import LedgerLine, ModelSpec
from comfy_wan_dist.mesh.flops import rank_flops
from comfy_wan_dist.mesh.layout import job_ranks
from comfy_wan_dist.mesh.memory import rank_memory
from comfy_wan_dist.mesh.shape import TI2V_5B, LatentGrid, WanShape
from comfy_wan_dist.mesh.traffic import Transfer, transfers
from comfy_wan_dist.mesh.workload import Counting, Workload, bubble, requested_workload
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.ledgers import predict_ledger
from devtools.mesh_runs import (
    MESHES,
    SIZED_MESHES,
    Inputs,
    LocalJob,
    Schedule,
    build_local_runner,
    build_request,
    mesh_degrees,
    model_spec,
    sample_rank,
)
from devtools.rank_pool import RankPool
from workers.model.wan import Block, WanModel

MIB = 2**20
SIGMAS = (1.0, 0.8, 0.5, 0.0)
SCHEDULE = Schedule(solver="euler", sigmas=SIGMAS, guidance=5.0)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job on a plane. By itself 45 tokens, 15 in a frame: no degree but 3 and 5 divides them.

    is_padded: the last row of tokens is half padding.
    """

    mesh: str
    batch: int = 1
    guided: bool = True
    has_text_per_sample: bool = False
    frames: int = 3
    rows: int = 3
    columns: int = 5
    is_padded: bool = False
    has_first_frame: bool = False

    def inputs(self) -> Inputs:
        height, width = 2 * self.rows - self.is_padded, 2 * self.columns
        size = (self.batch, TINY_TRANSFORMER.in_dim, self.frames, height, width)
        texts = self.batch if self.has_text_per_sample else 1
        return Inputs(
            noisy=torch.randn(size),
            cond=torch.randn(texts, 20, TINY_TRANSFORMER.text_dim),
            uncond=torch.randn(texts, 24, TINY_TRANSFORMER.text_dim) if self.guided else None,
            frame_mask=(torch.arange(self.frames) > 0).float().expand(self.batch, -1)
            if self.has_first_frame
            else None,
        )

    def planned(self, dtype: str) -> Workload:
        return Workload(
            shape=TINY_TRANSFORMER,
            grid=LatentGrid(
                frames=self.frames,
                rows=self.rows,
                columns=self.columns,
                is_padded=self.is_padded,
            ),
            steps=len(SIGMAS) - 1,
            guided=self.guided,
            batch=self.batch,
            dtype=dtype,
            text_tokens=(20, 24),
            text_batch=self.batch if self.has_text_per_sample else 1,
            timestep_rows=2 if self.has_first_frame else 1,
        )


# By plane: jobs that it serves without loading again.
PLANES: dict[str, tuple[Run, ...]] = {
    "ring2": (Run(mesh="ring2"), Run(mesh="ulysses2", guided=False), Run(mesh="dp2", batch=3)),
    "ring3": (Run(mesh="ring3"), Run(mesh="ring3", frames=2, rows=2, guided=False, is_padded=True)),
    "ring5": (Run(mesh="ring5", frames=2, columns=7),),
    "ulysses4": (
        Run(mesh="ulysses4"),
        Run(mesh="ring2-ulysses2", batch=2),
        Run(mesh="cfg2-ulysses2", batch=2, has_text_per_sample=True),
        Run(mesh="dp2-cfg2", batch=3, has_text_per_sample=True),
        Run(mesh="dp2-ring2", batch=3, is_padded=True),
        Run(mesh="dp4", batch=4),
    ),
    "tp2": (Run(mesh="tp2"),),
    "tp2-sp": (Run(mesh="tp2-sp", batch=2), Run(mesh="tp2-sp", guided=False)),
    "tp4-sp": (Run(mesh="tp4-sp"),),
    "ring2-tp2-sp": (
        Run(mesh="ring2-tp2-sp", is_padded=True),
        Run(mesh="ulysses2-tp2-sp", batch=2),
    ),
    "pp2": (Run(mesh="pp2", batch=2, has_text_per_sample=True), Run(mesh="pp2", guided=False)),
    "cfg2-pp2-tp2": (Run(mesh="cfg2-pp2-tp2", batch=2), Run(mesh="dp2-pp2-tp2", batch=3)),
    "pp2-tp2-sp": (Run(mesh="pp2-tp2-sp", batch=2),),
    "ulysses2-fsdp": (
        Run(mesh="ulysses2-fsdp"),
        Run(mesh="cfg2-fsdp", batch=2),
        Run(mesh="ring2-fsdp", guided=False),
    ),
    "cfg2-pp2-tp2-fsdp": (Run(mesh="cfg2-pp2-tp2-fsdp", batch=2),),
    "cfg2-ulysses2-tp2": (
        Run(mesh="cfg2-ulysses2-tp2"),
        Run(mesh="ring2-ulysses2-tp2", guided=False),
        Run(mesh="ring4-tp2"),
    ),
}


def ledgers_of(
    rank: int, plane: str, runs: tuple[Run, ...], spec: ModelSpec
) -> list[tuple[LedgerLine, ...]]:
    """This rank's ledger of each job, one after another on one loaded plane."""
    runner, agreement = build_local_runner(rank, plane)
    schedule = Schedule(solver="uni_pc", sigmas=SIGMAS, guidance=5.0)
    ledgers = []
    for run in runs:
        torch.manual_seed(0)
        request, tensors = build_request(spec, run.inputs(), schedule, mesh=run.mesh)
        ledgers.append(runner.run(request, LocalJob(tensors, agreement)).ledger)  # type: ignore[arg-type]
    return ledgers


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("traffic") / "tiny.safetensors"
    write_transformer(path, TINY_TRANSFORMER, seed=0)
    return model_spec(path)


# Whatever parity is measured on, and is not there yet.
for parity_mesh in (*MESHES[1:], *SIZED_MESHES):
    PLANES.setdefault(parity_mesh, (Run(mesh=parity_mesh, batch=mesh_degrees(parity_mesh).dp),))

# In bfloat16 norm sums and latents stay float32; these planes have every collective.
TYPED = [
    *((plane, "float32") for plane in PLANES),
    ("cfg2-ulysses2-tp2", "bfloat16"),
    ("pp2-tp2-sp", "bfloat16"),
    ("ulysses2-fsdp", "bfloat16"),
]


@pytest.mark.parametrize(("plane", "dtype"), TYPED)
def test_planned_ledger_equals_the_counted_one(
    plane: str, dtype: str, rank_pool: RankPool, spec: ModelSpec
) -> None:
    runs, layout = PLANES[plane], mesh_degrees(plane)
    counted = rank_pool.run(layout.world_size, ledgers_of, plane, runs, replace(spec, dtype=dtype))
    for index, run in enumerate(runs):
        degrees = mesh_degrees(run.mesh)
        for job_rank, player in enumerate(job_ranks(layout, degrees)):
            planned = predict_ledger(run.planned(dtype), degrees, job_rank)
            assert planned == counted[player][index], (run, job_rank)
            assert planned, "a mesh that sends nothing would prove nothing"


# ---- the numbers that papers give


def video(*, guided: bool = False) -> Workload:
    """TI2V-5B, 704x1280, 121 frames, 50 steps, bfloat16: 27280 tokens of 3072."""
    return Workload(
        shape=TI2V_5B, grid=LatentGrid(frames=31, rows=22, columns=40), steps=50, guided=guided
    )


def planned(
    mesh: str, what: str, counting: Counting = Counting.RUN, *, guided: bool = False
) -> tuple[Transfer, ...]:
    found = transfers(video(guided=guided), mesh_degrees(mesh), 0, counting)
    return tuple(transfer for transfer in found if transfer.what == what)


def mebibytes(transfer: Transfer) -> float:
    return round(transfer.bytes / MIB, 2)


@pytest.mark.parametrize(
    ("mesh", "size"), [("tp2", 159.84), ("tp8", 159.84), ("ulysses2-tp2", 79.92)]
)
def test_tensor_parallel_sums(mesh: str, size: float) -> None:
    (sums,) = planned(mesh, "row-parallel sums")
    assert (sums.op, sums.total_calls(50), mebibytes(sums)) == ("all_reduce", 4500, size)


def test_tensor_parallel_norm_sums() -> None:
    (self_attention,) = planned("tp2", "sums of self-attention norms")
    (cross,) = planned("tp2", "sums of cross-attention norms")
    (text,) = planned("tp2", "sums of text key norms")
    (text_each_step,) = planned("tp2", "sums of text key norms", Counting.LITERATURE)
    assert mebibytes(self_attention) == 0.21
    assert round((cross.bytes + text.bytes) / MIB, 2) == 0.11
    assert self_attention.total_calls(50) == cross.total_calls(50) == 1500
    assert (text.total_calls(50), text_each_step.total_calls(50)) == (30, 1500)


def test_ulysses_exchanges() -> None:
    (qkv,) = planned("ulysses2", "q, k and v: tokens to heads")
    (output,) = planned("ulysses2", "attention's output: heads to tokens")
    assert [mebibytes(qkv), mebibytes(output)] == [239.77, 79.92]
    assert qkv.total_calls(50) == output.total_calls(50) == 1500
    assert qkv.sent_bytes == qkv.bytes / 2


def test_latent_is_gathered_where_it_is_narrow() -> None:
    (each_step,) = planned("ulysses2", "token shards of the latent", Counting.LITERATURE)
    (once,) = planned("ulysses2", "token shards of the latent")
    (output,) = planned("ulysses2", "attention's output: heads to tokens")
    assert (mebibytes(each_step), each_step.total_calls(50)) == (5.00, 50)
    assert (once.bytes, once.total_calls(50)) == (2 * each_step.bytes, 1)  # float32
    assert mebibytes(output) == 79.92  # what the same shard weighs at the model's width


def test_guidance_exchange() -> None:
    what = "predictions of the guidance branches"
    (whole,) = planned("cfg2-ulysses2", what, Counting.LITERATURE, guided=True)
    (shard,) = planned("cfg2-ulysses2", what, guided=True)
    assert mebibytes(whole) == 9.99
    assert mebibytes(shard) == round(2 * 5.00, 2) - 0.01  # 4.995 MiB in bfloat16, twice in float32
    assert whole.total_calls(50) == shard.total_calls(50) == 50
    assert not planned("cfg2-ulysses2", what)


def test_pipeline_boundary() -> None:
    (residual,) = planned("pp2", "residual to the next stage")
    assert (mebibytes(residual), residual.total_calls(50)) == (159.84, 50)


@pytest.mark.parametrize(
    ("axis", "sent"),
    [("tp", (503, 754, 880)), ("ulysses", (168, 126, 73)), ("ring", (168, 251, 293))],
)
def test_bytes_sent_in_a_block(axis: str, sent: tuple[int, int, int]) -> None:
    for degree, megabytes in zip((2, 4, 8), sent, strict=True):
        per_step = sum(
            transfer.calls * transfer.sent_bytes
            for transfer in transfers(video(), mesh_degrees(f"{axis}{degree}"), 0)
            if transfer.dtype == "bfloat16"
        )
        assert round(per_step / TI2V_5B.num_layers / 1e6) == megabytes


def test_sequence_parallel_sends_what_the_sums_send() -> None:
    def sent(mesh: str) -> float:
        found = transfers(video(), mesh_degrees(mesh), 0)
        return sum(item.calls * item.sent_bytes for item in found if item.dtype == "bfloat16")

    assert sent("tp4-sp") == pytest.approx(sent("tp4"))


@pytest.mark.parametrize("stages", range(1, 5))
@pytest.mark.parametrize("batches", range(1, 9))
def test_bubble_of_the_timeline(stages: int, batches: int) -> None:
    # Micro-batches enter one after another; each moves on by a stage per slot.
    at = {(stage, batch): stage + batch for stage in range(stages) for batch in range(batches)}
    slots = {(stage, time) for (stage, _), time in at.items()}
    assert len(slots) == len(at) == stages * batches
    for (stage, batch), time in at.items():
        assert stage == 0 or at[stage - 1, batch] < time
        assert batch == 0 or at[stage, batch - 1] < time
    length = 1 + max(at.values())
    idle = stages * length - len(slots)
    expected = (stages - 1) / (batches + stages - 1)
    assert idle / (stages * length) == pytest.approx(expected, abs=1e-12)
    assert bubble(stages=stages, micro_batches=batches) == pytest.approx(expected, abs=1e-12)


def test_bubble_of_four_stages_and_four_micro_batches() -> None:
    assert bubble(stages=4, micro_batches=4) == pytest.approx(3 / 7)


# ---- FLOPs


def test_flops_of_the_worked_example() -> None:
    flops = rank_flops(video(), mesh_degrees("single"), 0, Counting.LITERATURE)
    block = flops.block
    parts = (block.projections, block.attention, block.cross, block.ffn, block.total)
    assert [round(part / 1e12, 3) for part in parts] == [2.060, 9.145, 1.221, 4.806, 17.231]
    assert flops.block_calls * block.total / 1e12 == pytest.approx(517, abs=0.5)
    guided = rank_flops(video(guided=True), mesh_degrees("single"), 0, Counting.LITERATURE)
    assert guided.step / 1e15 == pytest.approx(1.03, abs=0.006)
    assert guided.job(50) / 1e15 == pytest.approx(51.7, abs=0.1)


@pytest.mark.parametrize(
    "mesh", ["cfg2", "ulysses4", "ring3", "tp4", "tp2-sp", "cfg2-ulysses2-tp2", "pp3", "ring5"]
)
def test_ranks_share_the_blocks_work(mesh: str) -> None:
    degrees = mesh_degrees(mesh)
    whole = rank_flops(video(guided=True), mesh_degrees("single"), 0)
    shares = [rank_flops(video(guided=True), degrees, rank) for rank in range(degrees.world_size)]
    total = sum(share.block_calls * share.block.total for share in shares)
    assert total == pytest.approx(whole.block_calls * whole.block.total, rel=1e-9)
    # Uneven shards: no rank has over one grid row more than another.
    assert max(share.step for share in shares) / min(share.step for share in shares) < 1.01


def counted_flops(rank: int, plane: str, run: Run, spec: ModelSpec) -> int:
    """What torch's counter sees of one job; attention is added, which it does not know on the CPU."""
    runner, agreement = build_local_runner(rank, plane)
    request, tensors = build_request(spec, run.inputs(), SCHEDULE, mesh=run.mesh)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention_flops(
        q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object
    ) -> int:
        return 4 * q[0] * q[1] * q[2] * k[2] * q[3]

    with FlopCounterMode(display=False, custom_mapping={attention: attention_flops}) as counter:
        runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("plane", "run"),
    [
        ("single", Run(mesh="single", batch=2)),
        ("single", Run(mesh="single", batch=2, has_first_frame=True)),
        ("ulysses4", Run(mesh="ring2-ulysses2")),
        ("pp2-tp2-sp", Run(mesh="pp2-tp2-sp", batch=2)),
    ],
    ids=["single", "first-frame", "ring2-ulysses2", "pp2-tp2-sp"],
)
def test_planned_flops_equal_the_counted_ones(
    plane: str, run: Run, rank_pool: RankPool, spec: ModelSpec
) -> None:
    layout, degrees = mesh_degrees(plane), mesh_degrees(run.mesh)
    counted = rank_pool.run(layout.world_size, counted_flops, plane, run, spec)
    request, _ = build_request(spec, run.inputs(), SCHEDULE, mesh=run.mesh)
    planned = requested_workload(request, TINY_TRANSFORMER)
    assert planned == run.planned("float32")
    for job_rank, player in enumerate(job_ranks(layout, degrees)):
        flops = rank_flops(planned, degrees, job_rank)
        assert flops.job(len(SIGMAS) - 1) == counted[player]


# ---- memory

# Wide enough for activations to outweigh everything else; 100 tokens in a frame.
WIDE = WanShape(dim=1024, ffn_dim=4608, num_layers=1, in_dim=48, out_dim=48)


def peak_of_blocks(
    rank: int, mesh: str, spec: ModelSpec, inputs: Inputs, schedule: Schedule
) -> int:
    """Bytes of activations in the blocks, their input included, at the largest moment."""
    original, live = WanModel.run_blocks, LiveBytes()

    def watched(self: WanModel, *arguments: Any) -> torch.Tensor:
        with live:
            return original(self, *arguments)

    with mock.patch.object(WanModel, "run_blocks", watched):
        sample_rank(rank, mesh, spec, inputs, schedule)
    return live.peak


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        ("single", "bfloat16"),
        ("single", "float32"),
        ("tp2", "bfloat16"),
        ("tp4", "float32"),
        ("tp4-sp", "float32"),
        ("ulysses2", "bfloat16"),
        ("ring2", "bfloat16"),
        ("ring2-ulysses2", "bfloat16"),
        ("ring2-ulysses2", "float32"),
    ],
)
def test_planned_activations_are_what_a_rank_holds(
    mesh: str, dtype: str, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "wide.safetensors"
    if not path.exists():
        write_transformer(path, WIDE, seed=0)
    degrees = mesh_degrees(mesh)
    inputs = Inputs(noisy=torch.randn(1, 48, 4, 20, 20), cond=torch.randn(1, 20, WIDE.text_dim))
    schedule = Schedule(solver="euler", sigmas=(1.0, 0.0), guidance=1.0)
    held = rank_pool.run(
        degrees.world_size, peak_of_blocks, mesh, model_spec(path, dtype=dtype), inputs, schedule
    )
    job = Workload(
        shape=WIDE,
        grid=LatentGrid(frames=4, rows=10, columns=10),
        steps=1,
        guided=False,
        dtype=dtype,
        text_tokens=(20, 20),
    )
    assert rank_memory(job, degrees, 0).activations == pytest.approx(held[0], rel=0.05)


def held_before_queries(
    rank: int, mesh: str, spec: ModelSpec, inputs: Inputs, schedule: Schedule
) -> int:
    """Bytes of activations when self-attention's first column-parallel layer begins."""
    original, live, held = WanModel.run_blocks, LiveBytes(), []

    def watched(self: WanModel, *arguments: Any) -> torch.Tensor:
        block = cast(Block, self.blocks["0"])
        hook = block.self_attn.q.register_forward_pre_hook(lambda *_: held.append(live.now))
        with live:
            out = original(self, *arguments)
        hook.remove()
        return out

    with mock.patch.object(WanModel, "run_blocks", watched):
        sample_rank(rank, mesh, spec, inputs, schedule)
    return held[0]


def test_sequence_parallel_holds_less_between_the_pairs(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Residual and norm output are 2*N*D without sp; with it 2*N*D / tp, and one N*D that is gathered."""
    path = tmp_path_factory.getbasetemp() / "wide.safetensors"
    if not path.exists():
        write_transformer(path, WIDE, seed=0)
    inputs = Inputs(noisy=torch.randn(1, 48, 4, 20, 20), cond=torch.randn(1, 20, WIDE.text_dim))
    schedule = Schedule(solver="euler", sigmas=(1.0, 0.0), guidance=1.0)
    residual = 400 * WIDE.dim * 4
    for mesh, expected in (("tp4", 2 * residual), ("tp4-sp", (2 / 4 + 1) * residual)):
        held = rank_pool.run(4, held_before_queries, mesh, model_spec(path), inputs, schedule)
        assert held == pytest.approx([expected] * 4, rel=0.1), mesh
