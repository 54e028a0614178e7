"""Valid meshes for a job on given devices, what each would cost, and the best for latency and for throughput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..ipc.errors import ConfigError, MeshError
from ..mesh.choice import choose_job_mesh, choose_mesh, explain_mesh, preference, valid_planes
from ..mesh.degrees import AXES, MeshDegrees
from ..mesh.flops import rank_flops
from ..mesh.layout import stage_ranks
from ..mesh.memory import RankMemory, rank_memory
from ..mesh.traffic import When, transfers
from ..mesh.validate import validate_grid
from ..mesh.workload import Workload
from .hardware import DevicePool
from .seconds import PredictedSeconds, predict_seconds

TIE = 0.03
"""Predictions that differ by less say nothing about which mesh is faster; then auto's rule decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshOption:
    """One mesh. Bytes and FLOPs are of the rank that has most, in one step.

    seconds: of one job on one set of planes. videos_per_hour: of a queue that never runs dry.
    sent: (axis, bytes that cross the rank's link), for each axis that sends.
    """

    mesh: MeshDegrees
    memory: RankMemory
    fits: bool
    step_flops: int
    sent: tuple[tuple[str, int], ...]
    seconds: PredictedSeconds
    videos_per_hour: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A mesh that the plan names, and why."""

    option: MeshOption
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """options: fastest first, those that do not fit last. latency, throughput: None if nothing fits.

    auto: the mesh of this job on a group whose mesh is `auto`.
    """

    job: Workload
    pool: DevicePool
    options: tuple[MeshOption, ...]
    latency: Choice | None
    throughput: Choice | None
    auto: Choice


def make_plan(job: Workload, pool: DevicePool) -> Plan:
    """Plan for the pool's devices as if all were its weakest. Raises ConfigError for a pool without devices."""
    if not pool.devices:
        raise ConfigError("no GPU is here to plan for; name some, such as 8xH100-SXM")
    options = sorted(
        weigh_meshes(job, pool),
        key=lambda option: (not option.fits, option.seconds.video),
    )
    device = pool.weakest
    loaded = choose_mesh(
        job.shape,
        device_count=pool.count,
        guided=True,
        device_memory=device.memory,
        dtype=job.dtype,
        grid=job.grid,
    )
    auto_mesh = choose_job_mesh(loaded, job, is_auto=True, device_memory=device.memory)
    auto = Choice(
        option=weigh_mesh(job, auto_mesh, pool),
        reason=explain_mesh(auto_mesh, job, device_memory=device.memory),
    )
    return Plan(
        job=job,
        pool=pool,
        options=tuple(options),
        latency=_fastest(job, pool, options, auto.option),
        throughput=_busiest(job, pool, options),
        auto=auto,
    )


def weigh_meshes(job: Workload, pool: DevicePool) -> Iterator[MeshOption]:
    """All candidates; those that do not fit also with fsdp."""
    for mesh in candidates(job, pool.count):
        option = weigh_mesh(job, mesh, pool)
        yield option
        if not option.fits and mesh.replicas > 1:
            yield weigh_mesh(job, replace(mesh, fsdp=True), pool)


def candidates(job: Workload, device_count: int) -> Iterator[MeshDegrees]:
    """Meshes worth weighing: planes of any size, alone, in as many copies as there are devices for, or one for each
    sample of the batch; with tp also with sp."""
    planes: set[MeshDegrees] = set()
    for count in {device_count, *range(1, min(device_count, 8) + 1)}:
        planes |= {
            mesh
            for mesh in valid_planes(job.shape, device_count=count, guided=job.guided)
            if mesh.world_size == count or device_count % mesh.world_size == 0
        }
    for plane in planes:
        copies = device_count // plane.world_size
        for dp in {1, copies, *(part for part in range(2, copies + 1) if part <= job.batch)}:
            for sp in {False, plane.tp > 1}:
                mesh = replace(plane, dp=dp, sp=sp)
                try:
                    validate_grid(replace(mesh, dp=1), job.grid, batch=job.batch)
                except MeshError:
                    continue
                yield mesh


def weigh_mesh(job: Workload, mesh: MeshDegrees, pool: DevicePool) -> MeshOption:
    """What the job costs on a mesh. With more planes than samples each plane has a job of its own."""
    device = pool.weakest
    shares_batch = mesh.dp <= job.batch
    degrees = mesh if shares_batch else replace(mesh, dp=1)
    seconds = predict_seconds(job, degrees, device)
    ranks = stage_ranks(degrees)
    memory = max((rank_memory(job, degrees, rank) for rank in ranks), key=lambda each: each.total)
    sent: dict[str, float] = {}
    for transfer in transfers(job, degrees, ranks[0]):
        if transfer.when is When.STEP:
            sent[transfer.axis] = sent.get(transfer.axis, 0) + transfer.calls * transfer.sent_bytes
    return MeshOption(
        mesh=mesh,
        memory=memory,
        fits=memory.total <= device.memory,
        step_flops=max(rank_flops(job, degrees, rank).step for rank in ranks),
        sent=tuple((axis, round(sent[axis])) for axis in (*AXES, "cp", "fsdp") if axis in sent),
        seconds=seconds,
        videos_per_hour=(1 if shares_batch else mesh.dp) * job.batch * 3600 / seconds.video,
    )


def _fastest(
    job: Workload, pool: DevicePool, options: list[MeshOption], auto: MeshOption
) -> Choice | None:
    fitting = [option for option in options if option.fits and option.mesh.dp <= job.batch]
    if not fitting:
        return None
    best = fitting[0].seconds.video
    near = [option for option in fitting if option.seconds.video <= best * (1 + TIE)]
    chosen = max(near, key=lambda option: (option.mesh == auto.mesh, preference(option.mesh)))
    single = next((option for option in options if option.mesh == MeshDegrees()), None)
    gain = ""
    if single is not None and chosen.mesh.world_size > 1:
        gain = f"{single.seconds.video / chosen.seconds.video:.1f} times as fast as one device, as predicted. "
    return Choice(option=chosen, reason=gain + _explain(job, pool, chosen))


def _busiest(job: Workload, pool: DevicePool, options: list[MeshOption]) -> Choice | None:
    fitting = [option for option in options if option.fits]
    if not fitting:
        return None
    best = max(option.videos_per_hour for option in fitting)
    near = [option for option in fitting if option.videos_per_hour >= best / (1 + TIE)]
    chosen = max(near, key=lambda option: (option.mesh.dp, preference(option.mesh)))
    return Choice(
        option=chosen,
        reason=f"{chosen.videos_per_hour:.1f} videos in an hour when the queue is never empty. "
        + _explain(job, pool, chosen),
    )


def _explain(job: Workload, pool: DevicePool, option: MeshOption) -> str:
    return explain_mesh(option.mesh, job, device_memory=pool.weakest.memory)
