"""What `auto` chooses, for a plane and for each of its jobs, and why.

Latency of one video: CFG first when there is guidance, then Ulysses up to the head limit, and a ring for ranks that
the heads leave over, so that none idles. TP (and sp with it) only as far as memory asks, fsdp where that does not do,
stages last.
A batch is cut into sub-planes first: its samples need nothing from each other.

Who asks, in ComfyUI's process: `resolve_model` (jobs/handle.py) for a group's mesh, by `choose_mesh` if the user left
it to `auto`, within its memory by `fitting_mesh`; then `build_piece` (jobs/sampling.py; jobs/forwards.py for single
forwards) for each job's, by `choose_job_mesh`, before it is queued. The request carries it, and ranks only obey.
How a batch is shared out over planes that are groups of their own is decided before, by `piece_sizes`; how many
samples requests that wait together may bring into one run, by `joint_samples`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from .degrees import MeshDegrees
from .layout import stage_ranks, weight_layout
from .memory import load_bytes, rank_memory
from .shape import LatentGrid, WanShape
from .vae_shape import VAE_STRIDE
from .validate import allowed_tp, allowed_ulysses
from .workload import Workload

LARGE_VIDEO = LatentGrid(frames=31, rows=22, columns=40)
"""704x1280, 121 frames: what TI2V-5B was made for."""


def large_video(shape: WanShape) -> LatentGrid:
    """What a model was made for, and the size that a plane is chosen for: with 16 channels 720x1280, 81 frames."""
    if shape.vae_stride == VAE_STRIDE:
        return LARGE_VIDEO
    return LatentGrid(frames=21, rows=45, columns=80)


def valid_planes(shape: WanShape, *, device_count: int, guided: bool) -> Iterator[MeshDegrees]:
    """Every mesh of one plane of at most `device_count` ranks, without flags."""
    for tp in allowed_tp(shape):
        for ulysses in allowed_ulysses(shape, tp):
            for cfg in (1, 2) if guided else (1,):
                most = device_count // (tp * ulysses * cfg)
                for pp in range(1, min(most, shape.num_layers) + 1):
                    for ring in range(1, most // pp + 1):
                        yield MeshDegrees(cfg=cfg, pp=pp, ring=ring, ulysses=ulysses, tp=tp)


def preference(mesh: MeshDegrees) -> tuple[int, ...]:
    """Larger is better for the latency of one video, among meshes that fit."""
    return (
        -mesh.pp,
        mesh.world_size,
        not mesh.fsdp,
        -mesh.tp,
        not mesh.sp,
        mesh.cfg,
        mesh.ulysses,
    )


def choose_mesh(
    shape: WanShape,
    *,
    device_count: int,
    guided: bool,
    device_memory: int | None = None,
    dtype: str = "bfloat16",
    grid: LatentGrid | None = None,
    machines: int = 1,
) -> MeshDegrees:
    """The mesh to start a plane for, so that a video of `grid` (`large_video` by default) fits into `device_memory`
    bytes of each device.

    machines: the ranks divide by it, so that each machine gets as many.
    Without `device_memory` everything is taken to fit. Where nothing fits it is the mesh that needs least: loading it
    says what is missing.
    """
    planes = [
        mesh
        for mesh in valid_planes(shape, device_count=device_count, guided=guided)
        if mesh.world_size % machines == 0
    ]
    if device_memory is None:
        return max(planes, key=preference)
    job = Workload(
        shape=shape, grid=grid or large_video(shape), steps=1, guided=guided, dtype=dtype
    )
    planes += [replace(mesh, sp=True) for mesh in planes if mesh.tp > 1]
    planes += [replace(mesh, fsdp=True) for mesh in planes if mesh.replicas > 1]
    # In this order, as weighing all takes minutes on 1000 devices.
    best_first = sorted(planes, key=preference, reverse=True)
    fitting = (mesh for mesh in best_first if peak_bytes(job, mesh) <= device_memory)
    return next(fitting, None) or min(planes, key=lambda mesh: peak_bytes(job, mesh))


def fitting_mesh(
    shape: WanShape, *, device_count: int, share_memory: bool, free_bytes: int, dtype: str
) -> MeshDegrees | None:
    """The mesh of at most `device_count` ranks that `auto` likes best among those whose weights fit, or None.

    free_bytes: of one device, or of all ranks together where they share one memory (CPU).
    """
    planes = list(valid_planes(shape, device_count=device_count, guided=True))
    planes += [replace(mesh, fsdp=True) for mesh in planes if mesh.replicas > 1]

    def need(mesh: MeshDegrees) -> int:
        stages = [load_bytes(shape, mesh, stage=i, dtype=dtype) for i in range(mesh.pp)]
        return sum(stages) * (mesh.world_size // mesh.pp) if share_memory else max(stages)

    return max((mesh for mesh in planes if need(mesh) <= free_bytes), key=preference, default=None)


def peak_bytes(job: Workload, mesh: MeshDegrees) -> int:
    """What the rank that needs most takes."""
    return max(rank_memory(job, mesh, rank).total for rank in stage_ranks(mesh))


def explain_mesh(mesh: MeshDegrees, job: Workload, *, device_memory: int | None = None) -> str:
    """Why a mesh is cut as it is, one sentence for each axis."""
    reasons = " ".join(_reasons(mesh, job, device_memory))
    return reasons or "single: one device does everything, and nothing is sent."


def _reasons(mesh: MeshDegrees, job: Workload, device_memory: int | None) -> Iterator[str]:
    heads = job.shape.num_heads // mesh.tp
    if mesh.dp > 1:
        yield f"dp{mesh.dp}: each plane makes videos of its own, and they send each other nothing."
    if mesh.cfg > 1:
        yield "cfg2: the prompt and the negative prompt run side by side and exchange one prediction in a step."
    if mesh.pp > 1:
        yield (
            f"pp{mesh.pp}: each stage holds a part of the blocks; it saves memory but no time, as stages wait for "
            "each other."
        )
    if mesh.ring > 1:
        why = "its transfers hide behind the attention"
        if mesh.cp not in allowed_ulysses(job.shape, mesh.tp):
            why = f"the {heads} heads of a rank cannot be shared by {mesh.cp} ranks"
        yield f"ring{mesh.ring}: the tokens are cut without regard to heads; {why}."
    if mesh.ulysses > 1:
        yield (
            f"ulysses{mesh.ulysses}: the tokens are cut, and what a rank sends shrinks with the degree; "
            f"{heads} heads allow it."
        )
    if mesh.tp > 1:
        why = "it sends more than cutting tokens does and is worth it for memory"
        whole = peak_bytes(job, replace(mesh, dp=1, tp=1, sp=False))
        if device_memory is not None and whole > device_memory:
            why = (
                f"with whole ones a rank needs {whole / 1e9:.1f} GB of {device_memory / 1e9:.1f} GB"
            )
        yield f"tp{mesh.tp}: the weights are cut; {why}."
    if mesh.sp:
        yield "sp: the tp ranks share the tokens between the cut layers, which saves activations."
    if mesh.fsdp:
        yield (
            f"fsdp: {mesh.replicas} ranks share each block's weights and gather them when it runs, which saves memory."
        )


def choose_job_mesh(
    plane: MeshDegrees, job: Workload, *, is_auto: bool, device_memory: int | None = None
) -> MeshDegrees:
    """The mesh for one job on a loaded plane; no rank idles if any mesh can avoid it.

    A mesh that the user named stays as it is, except that without guidance its cfg axis cuts the batch in two or, if
    that is uneven, joins the context axes, which are then cut anew with as much ulysses as heads allow. With
    `device_memory` (bytes of one device) meshes on which the job fits go first.
    """
    if not is_auto and (job.guided or plane.cfg == 1):
        return plane
    replicas = weight_layout(plane).ring
    most_dp = 1 if plane.fsdp else job.batch if is_auto else plane.cfg
    heads = allowed_ulysses(job.shape, plane.tp)
    candidates = []
    for dp, cfg, ulysses in product(range(1, most_dp + 1), (1, 2) if job.guided else (1,), heads):
        ring, rest = divmod(replicas, dp * cfg * ulysses)
        if rest or job.batch % dp:
            continue
        mesh = replace(plane, dp=dp, cfg=cfg, ring=ring, ulysses=ulysses)
        if job.grid.tokens >= mesh.cp * (mesh.tp if mesh.sp else 1):
            candidates.append(mesh)
    if device_memory is not None:
        fitting = [mesh for mesh in candidates if peak_bytes(job, mesh) <= device_memory]
        candidates = fitting or candidates
    return max(candidates, key=lambda mesh: (mesh.dp, mesh.cfg, mesh.ulysses), default=plane)


def piece_sizes(degrees: MeshDegrees, *, batch: int) -> tuple[int, ...]:
    """How many samples of a batch each piece for one of the mesh's planes gets, in the batch's order.

    One plane takes the batch whole. Among several, single samples share out best, but pipeline stages need several at
    once to stay busy: with pp there is one piece per plane.
    """
    if degrees.dp == 1:
        return (batch,)
    count = min(batch, degrees.dp) if degrees.pp > 1 else batch
    size, rest = divmod(batch, count)
    return tuple(size + (index < rest) for index in range(count))


def joint_samples(mesh: MeshDegrees, job: Workload, *, device_memory: int | None = None) -> int:
    """How many samples one run on a job's mesh may have when others like the job share it; 0 if none may.

    With p stages and m micro-batches a step takes m + p - 1 slots, so each request that joins saves p - 1 of them. With
    p samples the stages are all at work for a time, and busy for p / (2p - 1) of it or, with guidance, 2p / (3p - 1).
    More would save as much again, but all wait for the whole run, all lose it with a plane, and each sample keeps its
    latents and text: no more than p, and with `device_memory` (bytes of one device) no more than fit.
    """
    if mesh.pp == 1:
        return 0
    for samples in range(mesh.pp * mesh.dp, job.batch, -1):
        shared = replace(job, batch=samples, text_batch=samples)
        if device_memory is None or peak_bytes(shared, mesh) <= device_memory:
            return samples
    return 0
