"""What a rank's ledger will say at the end of a job, from the planner's transfers: tests hold the two to each other."""

from __future__ import annotations

from collections import Counter

from comfy_wan_dist.ipc.messages import LedgerLine
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.traffic import transfers
from comfy_wan_dist.mesh.workload import Counting, Workload


def predict_ledger(job: Workload, degrees: MeshDegrees, rank: int) -> tuple[LedgerLine, ...]:
    """The ledger of rank `rank` of the job's mesh at the end of the job."""
    calls: Counter[tuple[str, str, str]] = Counter()
    total: Counter[tuple[str, str, str]] = Counter()
    for transfer in transfers(job, degrees, rank, Counting.RUN):
        key = (transfer.op, transfer.axis, transfer.dtype)
        count = transfer.total_calls(job.steps)
        calls[key] += count
        total[key] += count * transfer.bytes
    return tuple(
        LedgerLine(op=key[0], axis=key[1], dtype=key[2], calls=calls[key], bytes=total[key])
        for key in sorted(calls)
    )
