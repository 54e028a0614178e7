"""What `auto` chooses, for a plane and for each of its jobs, and why.

Latency of one video: CFG first when there is guidance, then Ulysses up to the head limit, and a ring for ranks that
the heads leave over, so that none idles. TP only as far as the weights need it, stages only where TP does not do.
A batch is cut into sub-planes first: its samples need nothing from each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from .degrees import MeshDegrees
from .layout import weight_layout
from .memory import WORKING_BYTES, weight_bytes
from .shape import LatentGrid, WanShape
from .validate import allowed_tp, allowed_ulysses


def valid_planes(shape: WanShape, *, device_count: int, guided: bool) -> Iterator[MeshDegrees]:
    """Every mesh of one plane of at most `device_count` ranks, without sp."""
    for tp in allowed_tp(shape):
        for ulysses in allowed_ulysses(shape, tp):
            for cfg in (1, 2) if guided else (1,):
                most = device_count // (tp * ulysses * cfg)
                for pp in range(1, min(most, shape.num_layers) + 1):
                    for ring in range(1, most // pp + 1):
                        yield MeshDegrees(cfg=cfg, pp=pp, ring=ring, ulysses=ulysses, tp=tp)


def preference(mesh: MeshDegrees) -> tuple[int, ...]:
    """Larger is better for the latency of one video, among meshes that fit."""
    return (-mesh.pp, mesh.world_size, mesh.cfg, -mesh.tp, mesh.ulysses)


def choose_mesh(
    shape: WanShape,
    *,
    device_count: int,
    guided: bool,
    device_memory: int | None = None,
    dtype: str = "bfloat16",
) -> MeshDegrees:
    """The mesh to start a plane for. Without `device_memory` (bytes of one device) all weights are taken to fit.

    Where nothing fits it is the mesh with the smallest share of the weights: loading it says what is missing.
    """
    planes = list(valid_planes(shape, device_count=device_count, guided=guided))
    if device_memory is None:
        return max(planes, key=preference)
    needs = {(mesh.tp, mesh.pp): loading_bytes(shape, mesh, dtype=dtype) for mesh in planes}
    fitting = [mesh for mesh in planes if needs[mesh.tp, mesh.pp] <= device_memory]
    if not fitting:
        return min(planes, key=lambda mesh: needs[mesh.tp, mesh.pp])
    return max(fitting, key=preference)


def loading_bytes(shape: WanShape, mesh: MeshDegrees, *, dtype: str) -> int:
    """What the rank with the most weights needs before any job."""
    weights = (weight_bytes(shape, mesh, stage=stage, dtype=dtype) for stage in range(mesh.pp))
    return max(weights) + WORKING_BYTES


def explain_mesh(
    mesh: MeshDegrees, shape: WanShape, *, device_memory: int | None = None, dtype: str = "bfloat16"
) -> str:
    """Why a mesh is cut as it is, one sentence for each axis."""
    heads = shape.num_heads // mesh.tp
    reasons = []
    if mesh.dp > 1:
        reasons.append(
            f"dp{mesh.dp}: each plane makes videos of its own, and they send each other nothing."
        )
    if mesh.cfg > 1:
        reasons.append(
            "cfg2: the prompt and the negative prompt run side by side and exchange one prediction in a step."
        )
    if mesh.pp > 1:
        reasons.append(
            f"pp{mesh.pp}: each stage holds a part of the blocks; it saves memory but no time, as stages wait for "
            "each other."
        )
    if mesh.ring > 1:
        why = (
            f"the {heads} heads of a rank cannot be shared by {mesh.cp} ranks"
            if mesh.cp not in allowed_ulysses(shape, mesh.tp)
            else "its transfers hide behind the attention"
        )
        reasons.append(f"ring{mesh.ring}: the tokens are cut without regard to heads; {why}.")
    if mesh.ulysses > 1:
        reasons.append(
            f"ulysses{mesh.ulysses}: the tokens are cut, and what a rank sends shrinks with the degree; "
            f"{heads} heads allow it."
        )
    if mesh.tp > 1:
        whole = loading_bytes(shape, replace(mesh, tp=1, sp=False), dtype=dtype)
        why = "it sends more than cutting tokens does and is worth it for memory"
        if device_memory is not None and whole > device_memory:
            why = f"whole they need {whole / 1e9:.1f} GB and a device has {device_memory / 1e9:.1f} GB"
        reasons.append(f"tp{mesh.tp}: the weights are cut; {why}.")
    if mesh.sp:
        reasons.append(
            "sp: the tp ranks share the tokens between the cut layers, which saves activations."
        )
    return " ".join(reasons) or "single: one device does everything, and nothing is sent."


def choose_job_mesh(
    plane: MeshDegrees,
    shape: WanShape,
    grid: LatentGrid,
    *,
    batch: int,
    guided: bool,
    is_auto: bool,
) -> MeshDegrees:
    """The mesh for one job on a loaded plane; no rank idles if any mesh can avoid it.

    A mesh that the user named stays as it is, except that without guidance its cfg axis joins the context axes.
    """
    if not is_auto and (guided or plane.cfg == 1):
        return plane
    replicas = weight_layout(plane).ring
    heads = allowed_ulysses(shape, plane.tp)
    candidates = []
    for dp, cfg, ulysses in product(range(1, batch + 1), (1, 2) if guided else (1,), heads):
        ring, rest = divmod(replicas, dp * cfg * ulysses)
        if rest or batch % dp or (not is_auto and dp > 1):
            continue
        mesh = replace(plane, dp=dp, cfg=cfg, ring=ring, ulysses=ulysses)
        if grid.tokens >= mesh.cp * (mesh.tp if mesh.sp else 1):
            candidates.append(mesh)
    return max(candidates, key=lambda mesh: (mesh.dp, mesh.cfg, mesh.ulysses), default=plane)
