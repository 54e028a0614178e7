"""What a mesh's ranks send and take, as text: counted beforehand, or as the ranks counted it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from ..ipc.messages import Done, LedgerLine
from .degrees import MeshDegrees
from .devices import GIB, MIB
from .traffic import transfers
from .workload import Counting, Workload


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


def transfers_text(job: Workload, mesh: MeshDegrees, rank: int) -> str:
    """Every collective of one rank, as this project runs it and as papers count it."""
    parts = []
    papers = "as papers count it: text and gathers in every step, all in the weights' dtype"
    for counting, label in ((Counting.RUN, "as it runs here"), (Counting.LITERATURE, papers)):
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

    how: in words, how the work was cut. requests: how many shared the run; the figures are of all of them.
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
    """What the ranks counted: per op and axis all calls and bytes, the most bytes and seconds of a rank."""
    alike: defaultdict[tuple[str, str, str], list[LedgerLine]] = defaultdict(list)
    for line in chain.from_iterable(ledgers):
        alike[line.axis, line.op, line.dtype].append(line)
    if not alike:
        return "no collectives: nothing was sent between ranks"
    rows = [
        [
            *key,
            str(sum(line.calls for line in lines)),
            f"{sum(line.bytes for line in lines) / MIB:.2f}",
            f"{max(line.bytes for line in lines) / MIB:.2f}",
            f"{max(line.seconds for line in lines):.3f}",
        ]
        for key, lines in sorted(alike.items(), key=lambda item: item[0])
    ]
    head = ("axis", "op", "dtype", "calls", "MiB, all ranks", "MiB, one rank", "s, one rank")
    return table(head, rows)
