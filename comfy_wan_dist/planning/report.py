"""Plans and ledgers as text to read and as plain values for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..ipc.messages import Done, LedgerLine
from ..mesh.degrees import MeshDegrees
from ..mesh.devices import GB, GIB, MIB
from ..mesh.traffic import transfers
from ..mesh.vae_shape import pixel_frames
from ..mesh.workload import Counting, Workload
from .hardware import Device
from .plan import Choice, MeshOption, Plan

ROWS = 12
"""Most rows of the plan's table; the meshes that it names are always among them."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


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
    guided = "with guidance" if job.guided else "without guidance (cfg 1)"
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
        for option in shown_options(plan)
    ]
    head = (
        "mesh",
        "ranks",
        "GB total",
        "GB weights",
        "TFLOP/step",
        "MB sent/step",
        "s/step",
        "s",
        "videos/h",
    )
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
            f"{pixels * job.grid.columns} x {pixels * job.grid.rows} pixels (width x height), "
            f"{pixel_frames(job.grid.frames)} frames, "
            f"{job.grid.tokens} tokens ({job.grid.frames} x {job.grid.rows} x {job.grid.columns}), {job.steps} steps, "
            f"batch {job.batch}, {guided}, {job.dtype}, on {plan.pool}",
            f"each device: {device.memory / GB:.0f} GB, {device.link_name}",
            "",
            table(head, rows),
            "! does not fit. GB, TFLOP and MB are of the rank with most; the VAE and the text encoder come on top.",
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
    if device.calibration is not None:
        can = device.calibration
        return (
            f"Seconds: measured here: {can.rate / 1e9:.1f} GFLOP/s per rank, {can.link / 1e9:.2f} GB/s between ranks, "
            f"{can.latency * 1e6:.0f} us for a collective."
        )
    return (
        "Seconds are no measurement: vendors' figures, of which guesses say that "
        f"{device.efficiency:.0%} of the arithmetic and {device.link_efficiency:.0%} of the link are reached, and that "
        f"a collective takes {device.latency * 1e6:.0f} us besides."
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


def transfers_text(job: Workload, mesh: MeshDegrees, rank: int) -> str:
    """Every collective of one rank, as this project runs it and as papers count it."""
    parts = []
    for counting, label in (
        (Counting.RUN, "as it runs here"),
        (
            Counting.LITERATURE,
            "as papers count it: text and gathers in every step, all in the weights' dtype",
        ),
    ):
        rows = [
            [
                item.what,
                item.op,
                item.axis,
                item.dtype,
                f"{item.bytes / MIB:.2f}",
                f"{item.sent_bytes / MIB:.2f}",
                str(item.total_calls(job.steps)),
            ]
            for item in transfers(job, mesh, rank, counting)
        ]
        head = ("what", "op", "axis", "dtype", "MiB", "MiB sent", "calls")
        body = table(head, rows) if rows else "nothing is sent"
        parts.append(f"rank {rank} of {mesh}, {label}\n{body}")
    return "\n\n".join(parts)


def job_text(how: str, answers: Sequence[Done], *, requests: int = 1) -> str:
    """How a job went: the slowest rank's time, what was read from disk, each rank's memory, and what was sent.

    how: it was cut. requests: how many shared the run; the figures are of all of them.
    """
    seconds = max((answer.seconds for answer in answers), default=0.0)
    read = sum(answer.bytes_read for answer in answers)
    shared = f", {requests} requests in one run" if requests > 1 else ""
    return (
        f"{how}, {len(answers)} ranks, {seconds:.2f} s, {read} bytes read from disk{shared}\n"
        f"peak memory by rank {peak_text(answers)} GiB\n"
        + ledger_text([answer.ledger for answer in answers])
    )


def peak_text(answers: Sequence[Done]) -> str:
    """The ranks' peak memory in GiB."""
    return ", ".join(f"{answer.peak_bytes / GIB:.2f}" for answer in answers)


def ledger_text(ledgers: Sequence[Sequence[LedgerLine]]) -> str:
    """What the ranks of a job counted: per op and axis all calls and bytes, the most bytes and seconds of a rank."""
    calls: Counter[tuple[str, str, str]] = Counter()
    total: Counter[tuple[str, str, str]] = Counter()
    most: dict[tuple[str, str, str], int] = {}
    longest: dict[tuple[str, str, str], float] = {}
    for line in (line for ledger in ledgers for line in ledger):
        key = (line.axis, line.op, line.dtype)
        calls[key] += line.calls
        total[key] += line.bytes
        most[key] = max(most.get(key, 0), line.bytes)
        longest[key] = max(longest.get(key, 0.0), line.seconds)
    if not calls:
        return "no collectives: nothing was sent between ranks"
    rows = [
        [
            *key,
            str(calls[key]),
            f"{total[key] / MIB:.2f}",
            f"{most[key] / MIB:.2f}",
            f"{longest[key]:.3f}",
        ]
        for key in sorted(calls)
    ]
    head = ("axis", "op", "dtype", "calls", "MiB, all ranks", "MiB, one rank", "s, one rank")
    return table(head, rows)
