"""One loaded plane serves each job on the mesh that suits it, without reading a weight again.

The meshes are the ones that `auto` takes. Covered: guidance, none, and a batch, one after another on the same ranks;
bytes read as the loader counts them and as the kernel does; every rank's arithmetic when guidance falls away. The same
through ComfyUI is in test_end_to_end.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from comfy_wan_dist.ipc.messages import ModelSpec
from comfy_wan_dist.mesh.choice import choose_job_mesh, choose_mesh
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.shape import LatentGrid
from comfy_wan_dist.mesh.workload import Workload
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.mesh_runs import (
    RUN_LIMIT,
    SIGMAS,
    Case,
    Inputs,
    LocalJob,
    Schedule,
    build_local_runner,
    build_request,
    model_spec,
    relative_error,
)
from devtools.rank_pool import RankPool

EVEN = Case(name="even", frames=4, height=16, width=16)
JOBS = {
    "cfg 5": (EVEN, True),
    "cfg 1": (EVEN, False),
    "batch of 4": (
        Case(name="batch", frames=3, height=6, width=6, batch=4, frame_mask=((0, 1, 1),) * 4),
        True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class JobOnRank:
    """rchar: bytes that the kernel says this process read during the job."""

    result: Tensor
    bytes_read: int
    rchar: int
    flops: int


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("remesh") / "tiny.safetensors"
    write_transformer(path, TINY_TRANSFORMER, seed=0)
    return model_spec(path)


def job_mesh(plane: MeshDegrees, case: Case, *, guided: bool) -> str:
    job = Workload(
        shape=TINY_TRANSFORMER,
        grid=LatentGrid(frames=case.frames, rows=case.height // 2, columns=case.width // 2),
        steps=1,
        guided=guided,
        batch=case.batch,
    )
    return str(choose_job_mesh(plane, job, is_auto=True))


def rchar() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def run_jobs(
    rank: int, plane: str, spec: ModelSpec, jobs: tuple[tuple[str, Inputs, bool], ...]
) -> list[JobOnRank]:
    """Jobs (mesh, inputs, guided) one after another on one runner."""
    runner, agreement = build_local_runner(rank, plane)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    done = []
    for mesh, inputs, guided in jobs:
        schedule = Schedule(solver="euler", sigmas=SIGMAS, guidance=5.0 if guided else 1.0)
        request, tensors = build_request(spec, inputs, schedule, mesh=mesh)
        before = rchar()
        with FlopCounterMode(display=False, custom_mapping={attention: attention_flops}) as counter:
            stats = runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
        done.append(
            JobOnRank(
                result=tensors[-1],
                bytes_read=stats.bytes_read,
                rchar=rchar() - before,
                flops=counter.get_total_flops(),
            )
        )
    return done


def attention_flops(q: torch.Size, k: torch.Size, *_: object, **__: object) -> int:
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3]


def test_one_plane_serves_every_job_on_its_own_mesh_and_reads_once(
    rank_pool: RankPool, spec: ModelSpec
) -> None:
    plane = choose_mesh(TINY_TRANSFORMER, device_count=4, guided=True)
    meshes = [job_mesh(plane, case, guided=guided) for case, guided in JOBS.values()]
    assert meshes == ["cfg2-ulysses2", "ulysses4", "dp4"]
    inputs = [case.inputs(TINY_TRANSFORMER, is_guided=guided) for case, guided in JOBS.values()]
    guided = [guided for _, guided in JOBS.values()]
    jobs = tuple(zip(meshes, inputs, guided, strict=True))
    alone = rank_pool.run(1, run_jobs, "single", spec, tuple(("single", *job[1:]) for job in jobs))
    ranks = rank_pool.run(4, run_jobs, str(plane), spec, jobs)
    for rank in ranks:
        first, *others = rank
        assert first.bytes_read < spec.file_bytes / 2  # replicas take turns
        assert first.rchar >= first.bytes_read
        for other in others:
            assert other.bytes_read == 0
            # What Python modules read that are imported late.
            assert other.rchar < spec.file_bytes / 100
    assert spec.file_bytes * 0.99 < sum(rank[0].bytes_read for rank in ranks) <= spec.file_bytes
    for job, (expected, actual) in enumerate(zip(alone[0], ranks[0], strict=True)):
        assert relative_error(actual.result, expected.result) <= RUN_LIMIT, list(JOBS)[job]


def test_without_guidance_every_rank_has_its_share(rank_pool: RankPool, spec: ModelSpec) -> None:
    """The ranks of cfg2 join the context axes: 4 ranks do half of what 2 ranks do, and none idles."""
    flops: dict[int, list[int]] = {}
    for count in (2, 4):
        plane = choose_mesh(TINY_TRANSFORMER, device_count=count, guided=True)
        assert plane.cfg == 2
        job = (job_mesh(plane, EVEN, guided=False), EVEN.inputs(TINY_TRANSFORMER, is_guided=False))
        ranks = rank_pool.run(count, run_jobs, str(plane), spec, ((*job, False),))
        flops[count] = [rank[0].flops for rank in ranks]
    assert max(flops[4]) <= 0.52 * min(flops[2])
    assert min(flops[4]) >= 0.99 * max(flops[4])
