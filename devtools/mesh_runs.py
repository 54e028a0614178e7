"""Sampling on a mesh through the product's own code, without ComfyUI and sockets: what parity is measured on.

Functions named `*_rank` run in a `RankPool`. Tensors go in and come out in ordinary memory; everything between is
what a rank of a worker group runs. `CASES` x `MESHES` is the matrix of the parity table: token counts that do not
divide, odd sides, shards that begin inside a frame, given first frames, partly given frames, and batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from comfy_wan_dist.ipc.messages import (
    COND,
    UNCOND,
    Condition,
    LedgerLine,
    LoraSpec,
    LowNoise,
    ModelSpec,
    SampleRequest,
    TensorRef,
)
from comfy_wan_dist.mesh.degrees import MeshDegrees, parse_mesh
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.header import content_of, read_model_file
from comfy_wan_dist.model_file.wan import read_wan_file
from devtools.reading import pass_by, read_alone
from workers.checkpoint.files import GivenFiles
from workers.checkpoint.load import load_weights
from workers.parallel.agreement import Agreement
from workers.parallel.compile import outside_graphs
from workers.parallel.groups import MeshGroups, PlaneGroups
from workers.parallel.parallelize import cut_model, finish_model
from workers.runner import PlaneRunner
from workers.sampling.denoise import KeptTokens
from workers.sampling.forward import ForwardInputs, PromptTensors, build_forward, prepare_forward

MESHES = (
    "single",
    "cfg2",
    "ulysses2",
    "ulysses4",
    "tp2",
    "tp4",
    "ulysses2-tp2",
    "cfg2-ulysses2-tp2",
    "ring2",
    "ring3",
    "ring2-ulysses2",
    "tp2-sp",
    "tp4-sp",
    "pp2",
    "pp3",
    "cfg2-pp2-tp2",
    "ring2-ulysses2-tp2-sp",
    "ulysses2-fsdp",
    "cfg2-pp2-tp2-fsdp",
    "dp2-cfg2-ulysses2",
)
"""What every case of CASES runs on."""
SIZED_MESHES = (
    "ring4",
    "ring2-ulysses2",
    "ring8",
    "ring4-ulysses2",
    "cfg2-ring2-ulysses2",
    "ring4-tp2-sp",
)
"""What every case of SIZES runs on: 4 and 8 ranks."""
SOLVERS = ("euler", "uni_pc")
SIGMAS = (1.0, 0.9375, 0.8333, 0.625, 0.0)
"""Four steps at shift 5; ComfyUI's `simple` gives nearly these."""
GUIDANCE = 5.0
FORWARD_SIGMA = 0.7
TEXT_TOKENS = 24

FORWARD_LIMIT = 1e-5
RUN_LIMIT = 1e-4
"""Allowed error in float32 against one process, as a part of the largest value."""

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a sampler node would hand over: normalised latents and text embeddings, float32."""

    noisy: Tensor
    cond: Tensor
    uncond: Tensor | None = None
    clean: Tensor | None = None
    mask: Tensor | None = None
    frame_mask: Tensor | None = None
    step_noise: Tensor | None = None
    cond_image: Tensor | None = None
    uncond_image: Tensor | None = None

    def prompt(self, branch: str) -> PromptTensors | None:
        """A branch's text and conditions, if there is the branch."""
        text = self.cond if branch == COND else self.uncond
        image = self.cond_image if branch == COND else self.uncond_image
        if text is None:
            return None
        return PromptTensors(text=text, conditions={} if image is None else {"image": image})


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """start: the latent's share of noise at the start; the first sigma if None."""

    solver: str
    sigmas: tuple[float, ...]
    guidance: float
    start: float | None = None

    @property
    def timesteps(self) -> tuple[float, ...]:
        return tuple(1000 * sigma for sigma in self.sigmas[:-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A latent [batch, C, frames, height, width], and how much of each frame is generated.

    frame_mask: for each sample of the batch one factor per frame, or None for text-to-video.
    """

    name: str
    frames: int
    height: int
    width: int
    batch: int = 1
    frame_mask: tuple[tuple[float, ...], ...] | None = None

    def inputs(self, shape: WanShape, *, is_guided: bool = True) -> Inputs:
        """Seeded inputs for a model of `shape`. A factor between 0 and 1 masks that part of the frame's columns.

        Where the model takes images, the prompt has one and the negative prompt one for each sample.
        """
        generator = torch.Generator().manual_seed(17)
        size = (self.batch, shape.out_dim, self.frames, self.height, self.width)
        noisy, clean = (torch.randn(size, generator=generator) for _ in range(2))
        text = (1, TEXT_TOKENS, shape.text_dim)
        cond, uncond = (torch.randn(text, generator=generator) for _ in range(2))
        negative = uncond if is_guided else None
        if shape.image_dim:
            one, each = (
                torch.randn(batch, shape.image_dim, *size[2:], generator=generator)
                for batch in (1, self.batch)
            )
            return Inputs(
                noisy=noisy,
                cond=cond,
                uncond=negative,
                cond_image=one,
                uncond_image=each if is_guided else None,
            )
        if self.frame_mask is None:
            return Inputs(noisy=noisy, cond=cond, uncond=negative)
        mask = torch.zeros(self.batch, 1, *size[2:])
        for sample, factors in enumerate(self.frame_mask):
            for frame, factor in enumerate(factors):
                mask[sample, :, frame, :, : round(factor * self.width)] = 1
        return Inputs(
            noisy=noisy,
            cond=cond,
            uncond=negative,
            clean=clean,
            mask=mask,
            frame_mask=mask.mean((1, 3, 4)),
        )


CASES = (
    Case(name="text-to-video", frames=3, height=4, width=6),
    Case(name="image-to-video", frames=3, height=4, width=6, frame_mask=((0, 1, 1),)),
    # 27 tokens, 9 per frame: no degree but 3 divides them, and every shard border lies inside a frame.
    Case(name="image-to-video, 27 tokens", frames=3, height=6, width=6, frame_mask=((0, 1, 1),)),
    # 7 x 5 values in 4 x 3 tokens: the last row and column hold padding, which is of the first ones.
    Case(
        name="image-to-video, odd sides, batch 2",
        frames=3,
        height=5,
        width=7,
        batch=2,
        frame_mask=((0, 1, 1), (0, 0.5, 1)),
    ),
    Case(
        name="image-to-video, batch 2",
        frames=3,
        height=4,
        width=6,
        batch=2,
        frame_mask=((0, 1, 1), (0, 0.5, 1)),
    ),
)


SIZES = tuple(
    Case(
        name=f"121x480x{16 * columns}",
        frames=31,
        height=30,
        width=columns,
        frame_mask=((0, *(1,) * 30),),
    )
    for columns in (52, 46)
)
"""Videos of real length: 12090 and 10695 tokens, 31 frames, which 4 and 8 ranks do not divide."""
TWO_HEADS = WanShape(dim=256, ffn_dim=256, num_layers=1, in_dim=48, out_dim=48, text_dim=64)
"""Small enough for SIZES."""
MANY_HEADS = WanShape(dim=3072, ffn_dim=128, num_layers=1, in_dim=48, out_dim=48, text_dim=64)
"""The 24 heads of TI2V-5B, which 5 ranks do not divide."""
MANY_HEADS_MESH = "ring5"


class LocalJob:
    """The job interface of the pipeline over ordinary tensors."""

    def __init__(self, tensors: Sequence[Tensor], agreement: Agreement) -> None:
        self._tensors = tensors
        self._agreement = agreement
        self.reports: list[tuple[str, int, int]] = []

    def tensor(self, ref: TensorRef) -> Tensor:
        return self._tensors[ref.buffer]

    def report(self, phase: str, done: int, total: int) -> None:
        self.reports.append((phase, done, total))

    def cancel_requested(self) -> bool:
        return False

    def agree(self, error: Exception | None) -> None:
        self._agreement.agree(error)

    def agree_stop(self) -> bool:
        return self._agreement.agree_stop(self.cancel_requested())

    def agree_least(self, number: int) -> int:
        return self._agreement.agree_least(number)


def model_spec(path: Path, *, dtype: str = "float32") -> ModelSpec:
    status = path.stat()
    return ModelSpec(
        path=str(path),
        file_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        dtype=dtype,
        compile=False,
        content=content_of(read_model_file(str(path))),
    )


def lora_spec(path: Path, strength: float) -> LoraSpec:
    status = path.stat()
    return LoraSpec(
        path=str(path),
        file_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        strength=strength,
        content=content_of(read_model_file(str(path))),
    )


def build_request(
    spec: ModelSpec,
    inputs: Inputs,
    schedule: Schedule,
    *,
    mesh: str,
    low_noise: LowNoise | None = None,
) -> tuple[SampleRequest, list[Tensor]]:
    """The request and the tensors that its refs name; the last one is the result."""
    tensors: list[Tensor] = []

    def required(tensor: Tensor) -> TensorRef:
        tensors.append(tensor)
        return TensorRef(
            buffer=len(tensors) - 1, offset=0, dtype="float32", shape=tuple(tensor.shape)
        )

    def optional(tensor: Tensor | None) -> TensorRef | None:
        return None if tensor is None else required(tensor)

    request = SampleRequest(
        id="local",
        model=spec,
        mesh=mesh,
        solver=schedule.solver,
        sigmas=schedule.sigmas,
        timesteps=schedule.timesteps,
        start=schedule.sigmas[0] if schedule.start is None else schedule.start,
        guidance=schedule.guidance,
        noisy=required(inputs.noisy),
        cond=required(inputs.cond),
        uncond=optional(inputs.uncond),
        clean=optional(inputs.clean),
        mask=optional(inputs.mask),
        frame_mask=optional(inputs.frame_mask),
        step_noise=optional(inputs.step_noise),
        conditions=tuple(
            Condition(name=name, branch=branch, tensor=required(tensor))
            for branch in (COND, UNCOND)
            if (prompt := inputs.prompt(branch)) is not None
            for name, tensor in prompt.conditions.items()
        ),
        low_noise=low_noise,
        result=required(torch.zeros_like(inputs.noisy)),
    )
    return request, tensors


def build_local_runner(rank: int, mesh: str, *, machines: int = 1) -> tuple[PlaneRunner, Agreement]:
    """The runner of one rank and its votes, as if the ranks were shared out over `machines`."""
    degrees = mesh_degrees(mesh)
    votes = dist.new_group() if degrees.world_size > 1 else None
    runner = PlaneRunner(
        degrees=degrees,
        rank=rank,
        local_ranks=degrees.world_size // machines,
        device=CPU,
        files=GivenFiles(),
    )
    return runner, Agreement(rank=rank, size=degrees.world_size, group=votes)


def single_groups() -> MeshGroups:
    """The groups of a rank that is alone; no process group is needed."""
    return PlaneGroups(layout=MeshDegrees(), rank=0).for_mesh(MeshDegrees())


def mesh_degrees(mesh: str) -> MeshDegrees:
    degrees = parse_mesh(mesh)
    assert degrees is not None, "auto is no mesh to run on"
    return degrees


def sample_rank(
    rank: int,
    mesh: str,
    spec: ModelSpec,
    inputs: Inputs,
    schedule: Schedule,
    low_noise: LowNoise | None = None,
) -> tuple[Tensor, tuple[LedgerLine, ...], int]:
    """One rank's run: result (rank 0's is filled), ledger, bytes read."""
    runner, agreement = build_local_runner(rank, mesh)
    request, tensors = build_request(spec, inputs, schedule, mesh=mesh, low_noise=low_noise)
    stats = runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
    return tensors[-1], stats.ledger, stats.bytes_read


@dataclass(frozen=True, kw_only=True)
class ForwardRun:
    """One forward of one rank.

    velocity: [B, C, T, h, w], guided, whole on every rank. text_ledger: what encoding the prompts
    sent. ledger: what the forward sent, guidance included and the gather of the result not.
    residuals: each block's output shard, unless blocks are compiled.
    """

    velocity: Tensor
    text_ledger: tuple[LedgerLine, ...]
    ledger: tuple[LedgerLine, ...]
    residuals: tuple[Tensor, ...]


def forward_rank(
    rank: int, mesh: str, spec: ModelSpec, inputs: Inputs, compile_backend: str | None = None
) -> ForwardRun:
    """Predict the velocity at sigma 0.7 once, from the file to the whole latent. Without LoRAs."""
    assert not spec.loras
    degrees = mesh_degrees(mesh)
    groups = PlaneGroups(layout=degrees, rank=rank).for_mesh(degrees)
    if compile_backend is not None:
        groups = outside_graphs(groups)
    file = read_wan_file(read_model_file(spec.path))
    model = cut_model(file.shape, groups, dtype=torch.float32, device=CPU)
    load_weights(model, file, groups, sharing=read_alone(), milestone=pass_by)
    loaded = finish_model(model, groups, compile_backend=compile_backend)
    residuals: list[Tensor] = []
    if compile_backend is None:
        for block in model.blocks.values():
            block.register_forward_hook(lambda _module, _inputs, output: residuals.append(output))
    cond = inputs.prompt(COND)
    assert cond is not None
    uncond = inputs.prompt(UNCOND)
    given = ForwardInputs(
        latent=inputs.noisy, cond=cond, uncond=uncond, frame_factors=inputs.frame_mask
    )
    with torch.inference_mode():
        own = prepare_forward(given, model.shape, groups, CPU)
        loaded.fit_to(own.shards, groups)
        forward = build_forward(model, own, guidance=None if uncond is None else GUIDANCE)
        text_ledger = groups.ledger.lines()
        groups.ledger.clear()
        x = own.shard(inputs.noisy)
        if inputs.clean is not None and inputs.mask is not None:
            x = KeptTokens(clean=own.shard(inputs.clean), mask=own.shard(inputs.mask)).blend(x)
        shard = forward.predict(x, 1000 * FORWARD_SIGMA)
        ledger = groups.ledger.lines()
        velocity = own.gather(shard)
    return ForwardRun(
        velocity=velocity.contiguous(),
        text_ledger=text_ledger,
        ledger=ledger,
        residuals=tuple(residuals),
    )


def matrix_rank(
    rank: int, mesh: str, spec: ModelSpec, cases: tuple[Case, ...], solvers: tuple[str, ...]
) -> dict[str, Tensor]:
    """Rank 0: every case's forward, and its run with every solver, by the name of the table's row.

    Left out: batches with fewer samples than the mesh has planes.
    """
    shape = read_wan_file(read_model_file(spec.path)).shape
    runner, agreement = build_local_runner(rank, mesh)
    results: dict[str, Tensor] = {}
    for case in cases:
        if case.batch < mesh_degrees(mesh).dp:
            continue
        inputs = case.inputs(shape)
        results[f"{case.name}, one forward"] = forward_rank(rank, mesh, spec, inputs).velocity
        for solver in solvers:
            schedule = Schedule(solver=solver, sigmas=SIGMAS, guidance=GUIDANCE)
            request, tensors = build_request(spec, inputs, schedule, mesh=mesh)
            runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
            results[f"{case.name}, {solver}, {len(SIGMAS) - 1} steps"] = tensors[-1]
    return results if rank == 0 else {}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a part of the largest expected value; infinite for NaN or another shape."""
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
        return float("inf")
    return float((actual.double() - expected.double()).abs().max() / expected.abs().max())
