"""A plan as text to read and as plain values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..mesh.degrees import MeshDegrees
from ..mesh.devices import GB
from ..mesh.report import table
from ..mesh.vae_shape import pixel_frames
from .hardware import EFFICIENCY, LATENCY, LINK_EFFICIENCY, Device
from .plan import Choice, MeshOption, Plan

HEAD = [
    "mesh",
    "ranks",
    "GB total",
    "GB weights",
    "TFLOP/step",
    "MB sent/step",
    "s/step",
    "s",
    "videos/h",
]
ROWS = 12
"""Rows of the plan's table; the meshes that the plan names are always among them."""


def shown_options(plan: Plan) -> list[MeshOption]:
    """The fastest options, the named ones and one device alone, fastest first, those that do not fit last."""
    named = [choice.option for choice in (plan.latency, plan.throughput, plan.auto) if choice]
    keep = {option.mesh for option in named} | {MeshDegrees()}
    others = [option for option in plan.options if option.mesh not in keep]
    keep |= {option.mesh for option in others[: max(0, ROWS - len(keep))]}
    return [option for option in plan.options if option.mesh in keep]


def plan_text(plan: Plan) -> str:
    """The job, a table of meshes, the ones to take with the reasons, and what is guessed."""
    job, device = plan.job, plan.pool.weakest
    pixels = 2 * job.shape.vae_stride
    padded = ", an odd side's padding included" if job.grid.is_padded else ""
    guided = "with guidance" if job.guided else "without guidance (cfg 1)"
    shown = shown_options(plan)
    rows = [
        [
            str(option.mesh),
            str(option.mesh.world_size),
            f"{option.memory.total / GB:.1f}" + ("" if option.fits else " !"),
            f"{option.memory.weights / GB:.1f}",
            f"{option.step_flops / 1e12:.4g}",
            " ".join(f"{axis} {sent / 1e6:,.0f}" for axis, sent in option.sent) or "-",
            f"{option.seconds.step:.3g}",
            f"{option.seconds.video:.3g}",
            f"{option.videos_per_hour:.3g}",
        ]
        for option in shown
    ]
    misfit = "" if all(option.fits for option in shown) else "! does not fit. "
    named = [
        f"{label}: {choice.option.mesh}{unfit(choice.option, device)}. {choice.reason}"
        if choice
        else f"{label}: none, as no mesh of these devices has the memory; use more or larger devices."
        for label, choice in (
            ("latency", plan.latency),
            ("throughput", plan.throughput),
            ("auto", plan.auto),
        )
    ]
    return "\n".join(
        [
            f"{pixels * job.grid.columns} x {pixels * job.grid.rows} pixels (width x height{padded}), "
            f"{pixel_frames(job.grid.frames)} frames, "
            f"{job.grid.tokens} tokens ({job.grid.frames} x {job.grid.rows} x {job.grid.columns}), {job.steps} steps, "
            f"batch {job.batch}, {guided}, {job.dtype}, on {plan.pool}",
            f"each device: {device.memory / GB:.0f} GB, {device.link_name}",
            "",
            table(HEAD, rows),
            f"{misfit}GB, TFLOP and MB are of the rank with most; the VAE and the text encoder come on top.",
            "Fastest first. Meshes within 3 % count as equal; among them the one that auto takes is named below.",
            "",
            *named,
            "",
            basis(device),
        ]
    )


def unfit(option: MeshOption, device: Device) -> str:
    """What to say of a mesh that is named although it does not fit."""
    if option.fits:
        return ""
    return f", which does not fit: it needs {option.memory.total / GB:.1f} GB of {device.memory / GB:.1f} GB"


def basis(device: Device) -> str:
    """Where the seconds come from."""
    if device.is_measured:
        can = device.half
        return (
            f"Seconds: measured here: {can.rate / 1e9:.1f} GFLOP/s per rank, {can.link / 1e9:.2f} GB/s between ranks, "
            f"{can.latency * 1e6:.0f} us for a collective."
        )
    return (
        "Seconds are no measurement: vendors' figures, of which guesses say that "
        f"{EFFICIENCY:.0%} of the arithmetic and {LINK_EFFICIENCY:.0%} of the link are reached, and that "
        f"a collective takes {LATENCY * 1e6:.0f} us besides."
    )


def plan_values(plan: Plan) -> dict[str, Any]:
    """The whole plan for JSON: bytes, FLOPs, seconds."""

    def named(choice: Choice | None) -> dict[str, Any] | None:
        if choice is None:
            return None
        return {"mesh": str(choice.option.mesh), "reason": choice.reason}

    return {
        "job": asdict(plan.job),
        "devices": str(plan.pool),
        "basis": basis(plan.pool.weakest),
        "latency": named(plan.latency),
        "throughput": named(plan.throughput),
        "auto": named(plan.auto),
        "meshes": [option_values(option) for option in plan.options],
    }


def option_values(option: MeshOption) -> dict[str, Any]:
    seconds = option.seconds
    return {
        "mesh": str(option.mesh),
        "ranks": option.mesh.world_size,
        "fits": option.fits,
        "memory": {**asdict(option.memory), "total": option.memory.total},
        "step_flops": option.step_flops,
        "step_sent_bytes": dict(option.sent),
        "seconds": {**asdict(seconds), "step": seconds.step, "video": seconds.video},
        "videos_per_hour": option.videos_per_hour,
    }
