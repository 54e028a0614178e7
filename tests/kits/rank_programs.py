"""What the ranks of the test pool run besides `devtools.mesh_runs`: broken collectives, wrapped ones, cancelled jobs.

A fault replaces one seam of the product by the mistake that is easily made there, so that a test can show that the
parity check notices it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.ipc.messages import LedgerLine, ModelSpec
from comfy_wan_dist.mesh.shape import LatentGrid
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.wan import read_wan_file
from devtools.mesh_runs import (
    CPU,
    ForwardRun,
    Inputs,
    LocalJob,
    Schedule,
    build_local_runner,
    build_request,
    forward_rank,
    mesh_degrees,
)
from devtools.reading import pass_by
from workers.checkpoint.load import load_weights
from workers.checkpoint.sharing import build_read_groups
from workers.model.tokens import rope_table, token_runs
from workers.model.wan import TokenRun, WanModel, mean_square
from workers.parallel.collectives import AxisGroup, Exchange
from workers.parallel.context import UlyssesAttention
from workers.parallel.fsdp import BookedGather, local_part
from workers.parallel.groups import PlaneGroups
from workers.parallel.parallelize import cut_model
from workers.parallel.sequence import SequenceParallel
from workers.parallel.tensor import RowParallelLinear, ShardedMeanSquare

T = TypeVar("T")
Fault = Callable[[], AbstractContextManager[Any]]
"""As long as it is entered, the product makes a mistake."""


def rank_local_norm() -> AbstractContextManager[Any]:
    """Query/key norm over the rank's own features only."""
    return mock.patch.object(
        ShardedMeanSquare, "__call__", lambda self, *tensors: mean_square(*tensors)
    )


def rank_local_cross_norm() -> AbstractContextManager[Any]:
    """The same in cross-attention alone, which norms one tensor at a time."""
    original = ShardedMeanSquare.__call__

    def local_if_one(self: ShardedMeanSquare, *tensors: Tensor) -> tuple[Tensor, ...]:
        return original(self, *tensors) if len(tensors) > 1 else mean_square(*tensors)

    return mock.patch.object(ShardedMeanSquare, "__call__", local_if_one)


def row_without_sum() -> AbstractContextManager[Any]:
    return mock.patch.object(
        RowParallelLinear, "forward", lambda self, x: F.linear(x, self.weight, self.bias)
    )


def row_bias_on_every_rank() -> AbstractContextManager[Any]:
    return mock.patch.object(
        RowParallelLinear,
        "forward",
        lambda self, x: self.reduce(F.linear(x, self.weight, self.bias)),
    )


def rope_from_zero() -> AbstractContextManager[Any]:
    """Every shard takes the positions of the first tokens."""

    def shifted(grid: LatentGrid, start: int, stop: int, *, device: torch.device) -> Tensor:
        return rope_table(grid, 0, stop - start, device=device)

    return mock.patch("workers.sampling.forward.rope_table", shifted)


def frame_rows_from_zero() -> AbstractContextManager[Any]:
    """Every shard takes the timesteps of the first tokens."""

    def shifted(
        rows: tuple[int, ...], grid: LatentGrid, start: int, stop: int
    ) -> tuple[TokenRun, ...]:
        return token_runs(rows, grid, 0, stop - start)

    return mock.patch("workers.sampling.forward.token_runs", shifted)


def all_frames_on_every_shard() -> AbstractContextManager[Any]:
    """All frames' timesteps are spread over each shard, as if it were the whole video."""

    def spread(
        rows: tuple[int, ...], grid: LatentGrid, start: int, stop: int
    ) -> tuple[TokenRun, ...]:
        size = stop - start
        borders = [size * frame // grid.frames for frame in range(grid.frames + 1)]
        return tuple(
            TokenRun(start=first, stop=last, row=row)
            for first, last, row in zip(borders, borders[1:], rows, strict=False)
        )

    return mock.patch("workers.sampling.forward.token_runs", spread)


def no_guidance_exchange() -> AbstractContextManager[Any]:
    """Each guidance plane takes its own prediction for both."""
    return mock.patch.object(AxisGroup, "all_gather", lambda self, x: torch.stack([x] * self.size))


def swapped_guidance_planes() -> AbstractContextManager[Any]:
    original = AxisGroup.all_gather
    return mock.patch.object(AxisGroup, "all_gather", lambda self, x: original(self, x).flip(0))


def no_ulysses_input_exchange() -> AbstractContextManager[Any]:
    return _without_all_to_all(dims=5)


def no_ulysses_output_exchange() -> AbstractContextManager[Any]:
    return _without_all_to_all(dims=4)


def _without_all_to_all(*, dims: int) -> AbstractContextManager[Any]:
    original = AxisGroup.all_to_all

    def keep_own(
        self: AxisGroup, x: Tensor, *, send: Sequence[int], receive: Sequence[int]
    ) -> Tensor:
        return x if x.dim() == dims else original(self, x, send=send, receive=receive)

    return mock.patch.object(AxisGroup, "all_to_all", keep_own)


def wrong_head_order() -> AbstractContextManager[Any]:
    """Heads come back interleaved over the ranks instead of rank after rank."""
    original = UlyssesAttention.__call__

    def interleaved(self: UlyssesAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = original(self, q, k, v).unflatten(2, (self.ulysses.size, -1))
        return out.transpose(2, 3).flatten(2, 3)

    return mock.patch.object(UlyssesAttention, "__call__", interleaved)


def no_final_gather() -> AbstractContextManager[Any]:
    return mock.patch.object(
        AxisGroup, "gather_rows", lambda self, x, sizes: torch.cat([x] * self.size)
    )


def no_ring() -> AbstractContextManager[Any]:
    """Every rank sees its own keys again and again."""
    return mock.patch.object(
        AxisGroup,
        "pass_on",
        lambda self, x, receive: Exchange(arriving=(x[:receive].clone(),)),
    )


def ring_without_weights() -> AbstractContextManager[Any]:
    """Partial results are averaged instead of weighted by their denominators."""

    def averaged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
        return (out + part.float()) / 2, torch.logaddexp(lse, part_lse)

    return mock.patch("workers.parallel.ring.merge", averaged)


def no_sequence_sum() -> AbstractContextManager[Any]:
    """Each rank keeps its run of its own partial sums."""

    def own_run(self: AxisGroup, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x.split(list(sizes))[self.rank]

    return mock.patch.object(AxisGroup, "reduce_scatter_rows", own_run)


def no_sequence_gather() -> AbstractContextManager[Any]:
    """Each rank takes its own tokens for those of all."""
    return mock.patch.object(
        SequenceParallel, "gather", lambda self, x: torch.cat([x] * self.tp.size, dim=1)
    )


def no_broadcast() -> AbstractContextManager[Any]:
    """Whoever waits for the predictions goes on with nothing."""
    return mock.patch.object(
        AxisGroup, "broadcast", lambda self, x, sender: x if self.rank == sender else x.zero_()
    )


def no_residual() -> AbstractContextManager[Any]:
    """Later stages start from nothing."""
    receive = AxisGroup.receive
    return mock.patch.object(
        AxisGroup, "receive", lambda self, out, sender: receive(self, out, sender).zero_()
    )


def no_weight_gather() -> AbstractContextManager[Any]:
    """Each rank takes its own part of a block for the parts of all."""

    def own_part(
        self: BookedGather, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any
    ) -> None:
        output_tensor.view(self.fsdp.size, -1).copy_(input_tensor.clone())

    return mock.patch.object(BookedGather, "__call__", own_part)


def no_fault() -> AbstractContextManager[Any]:
    return ExitStack()


def with_fault(
    rank: int,
    fault: Callable[[], AbstractContextManager[Any]],
    program: Callable[..., T],
    *arguments: Any,
) -> T:
    """program(rank, *arguments) while `fault` is in force on every rank."""
    with fault():
        return program(rank, *arguments)


def count_collectives(
    rank: int, mesh: str, spec: ModelSpec, inputs: Inputs
) -> tuple[dict[str, tuple[int, int]], tuple[LedgerLine, ...]]:
    """Calls and input bytes of torch's collectives during a forward with its prompts, seen from outside; the ledger.

    The gather of the result counts too; the ledger here leaves it out.
    """
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()

    def counted(op: str, name: str, argument: int) -> AbstractContextManager[Any]:
        original = getattr(dist, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            calls[op] += 1
            sent[op] += args[argument].numel() * args[argument].element_size()
            return original(*args, **options)

        return mock.patch.object(dist, name, wrapper)

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with (
        counted("all_reduce", "all_reduce", 0),
        counted("all_to_all", "all_to_all_single", 1),
        counted("all_gather", gather, 1),
    ):
        run = forward_rank(rank, mesh, spec, inputs)
    return {name: (calls[name], sent[name]) for name in calls}, (*run.text_ledger, *run.ledger)


def compiled_forward(
    rank: int, mesh: str, spec: ModelSpec, inputs: Inputs, backend: str
) -> tuple[ForwardRun, int]:
    """A forward with compiled blocks, and how many graphs were compiled for it."""
    from torch._dynamo.utils import counters  # seconds, and only this program needs it

    before = counters["stats"]["unique_graphs"]
    run = forward_rank(rank, mesh, spec, inputs, backend)
    return run, counters["stats"]["unique_graphs"] - before


def held_weight_bytes(
    rank: int, mesh: str, specs: Sequence[ModelSpec], inputs: Inputs, schedule: Schedule
) -> list[int]:
    """Memory of each model's weights after a job with it."""
    runner, agreement = build_local_runner(rank, mesh)
    groups = runner._plane.for_mesh(mesh_degrees(mesh))
    held = []
    for spec in specs:
        request, tensors = build_request(spec, inputs, schedule, mesh=mesh)
        runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
        assert runner._transformers.model.held is not None
        parameters = runner._transformers.model.held.loaded.model.parameters()
        storages = (local_part(each, groups.fsdp)[0].untyped_storage() for each in parameters)
        held.append(sum(storage.nbytes() for storage in storages))
    return held


def load_shard(
    plane: PlaneGroups,
    path: str,
    *,
    dtype: torch.dtype,
    machines: int = 1,
    fault: Fault = no_fault,
) -> tuple[WanModel, int]:
    """What the rank holds of a model after loading it together with the others, and the bytes that it read.

    fault: while it loads. Bytes that nothing is loaded into are all ones, which no value of a file is.
    """
    degrees = plane.layout
    groups = plane.for_mesh(degrees)
    file = read_wan_file(read_model_file(path))
    model = cut_model(file.shape, groups, dtype=dtype, device=CPU)
    for parameter in model.parameters():
        local_part(parameter, groups.fsdp)[0].view(torch.uint8).fill_(0xFF)
    with fault():
        bytes_read = load_weights(
            model,
            file,
            groups,
            sharing=build_read_groups(plane, local_ranks=degrees.world_size // machines),
            milestone=pass_by,
        )
    return model, bytes_read


def loaded_digests(
    rank: int, mesh: str, paths: Mapping[str, str], dtypes: Mapping[str, torch.dtype]
) -> dict[str, str]:
    """By the name of each model: digest of every parameter that this rank holds after loading it, bit for bit."""
    degrees = mesh_degrees(mesh)
    plane = PlaneGroups(layout=degrees, rank=rank)
    digests = {}
    for name, path in paths.items():
        model, _ = load_shard(plane, path, dtype=dtypes[name])
        digest = hashlib.sha256()
        for parameter, value in sorted(model.named_parameters()):
            digest.update(f"{parameter} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
        digests[name] = digest.hexdigest()
    return digests


class StoppingJob(LocalJob):
    """Told to stop at its vote number `stop_at`."""

    stop_at = 2
    votes = 0

    def cancel_requested(self) -> bool:
        return self.votes >= self.stop_at

    def agree_stop(self) -> bool:
        self.votes += 1
        return super().agree_stop()


def stop_then_sample(
    rank: int, mesh: str, spec: ModelSpec, inputs: Inputs, schedule: Schedule, stopping_rank: int
) -> tuple[str, list[tuple[str, int, int]], Tensor]:
    """A job that only `stopping_rank` is told to stop, then a whole one with the same runner.

    How the first one ended, what it reported, and the result of the second.
    """
    runner, agreement = build_local_runner(rank, mesh)
    request, tensors = build_request(spec, inputs, schedule, mesh=mesh)
    job = (StoppingJob if rank == stopping_rank else LocalJob)(tensors, agreement)
    ended = error_of(lambda: runner.run(request, job))  # type: ignore[arg-type]
    agreement.take_failure()
    runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
    return ended, job.reports, tensors[-1]


def sample_error(rank: int, mesh: str, spec: ModelSpec, inputs: Inputs, schedule: Schedule) -> str:
    """How a job that must fail does: class and message on this rank."""
    runner, agreement = build_local_runner(rank, mesh)
    request, tensors = build_request(spec, inputs, schedule, mesh=mesh)
    return error_of(lambda: runner.run(request, LocalJob(tensors, agreement)))  # type: ignore[arg-type]


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except WanDistError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
