"""What the ranks of the test pool run for models in two experts."""

from __future__ import annotations

from unittest import mock

from torch import Tensor

from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.ipc.messages import LowNoise, ModelSpec
from devtools.mesh_runs import Inputs, LocalJob, Schedule, build_local_runner, build_request
from workers.resident import transformers
from workers.resident.memory import Room


def sample_in_turns(
    rank: int,
    mesh: str,
    spec: ModelSpec,
    inputs: Inputs,
    schedule: Schedule,
    low_noise: LowNoise,
    margins: tuple[int, ...],
) -> tuple[list[Tensor], list[int], list[tuple[int, int]]]:
    """Jobs with both experts where that leaves the device `margins` bytes, then the second alone, the first alone.

    Results, bytes read, and bytes of the first and of the second expert's weights on the device after each job.
    """
    runner, agreement = build_local_runner(rank, mesh)
    both, both_tensors = build_request(spec, inputs, schedule, mesh=mesh, low_noise=low_noise)
    alone = [build_request(each, inputs, schedule, mesh=mesh) for each in (low_noise.model, spec)]
    results, read, held = [], [], []
    with (
        mock.patch.object(Room, "has_host", True),
        mock.patch.object(transformers, "margin_for_both", side_effect=margins),
    ):
        for request, tensors in (*[(both, both_tensors)] * len(margins), *alone):
            stats = runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
            results.append(tensors[-1].clone())
            read.append(stats.bytes_read)
            held.append(
                (
                    runner._transformers.model.device_bytes(),
                    runner._transformers.low_noise.device_bytes(),
                )
            )
    return results, read, held


def error_without_host_memory(
    rank: int,
    mesh: str,
    spec: ModelSpec,
    inputs: Inputs,
    schedule: Schedule,
    low_noise: LowNoise,
) -> str:
    """How a job fails whose experts fit neither together on the device nor in host memory; a good one follows."""
    runner, agreement = build_local_runner(rank, mesh)
    request, tensors = build_request(spec, inputs, schedule, mesh=mesh, low_noise=low_noise)
    error = "no error"
    with (
        mock.patch.object(Room, "has_host", True),
        mock.patch.object(transformers, "margin_for_both", return_value=-1),
        mock.patch("workers.resident.fit.free_memory", return_value=1000),
    ):
        try:
            runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
        except WanDistError as caught:
            error = f"{type(caught).__name__}: {caught}"
    agreement.take_failure()
    runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
    return error
