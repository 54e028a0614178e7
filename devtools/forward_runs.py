"""Single forwards on a mesh through the product's own code, as ComfyUI's samplers ask for them of a MODEL.

Functions named `*_rank` run in a `RankPool`. Tensors go in and come out in ordinary memory, as in `mesh_runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comfy_wan_dist.ipc.messages import COND, Condition, ForwardRequest, ModelSpec, TensorRef
from comfy_wan_dist.mesh.shape import WanShape

from .mesh_runs import TEXT_TOKENS, LocalJob, build_local_runner

PLANES = (
    *((mesh, mesh) for mesh in ("single", "tp2", "ulysses2", "ring2", "pp2", "tp2-sp")),
    *(("cfg2", mesh) for mesh in ("dp2", "ulysses2")),
    *(("cfg2-ulysses2", mesh) for mesh in ("dp2-ulysses2", "ulysses4", "ring4", "dp4")),
    ("cfg2-tp2", "dp2-tp2"),
    ("cfg2-pp2", "dp2-pp2"),
    ("ulysses2-fsdp", "ulysses2-fsdp"),
)
"""The mesh that a plane was started for, and one that its calls may be laid on."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A forward to be asked for on a mesh; names: of each sample's text."""

    mesh: str
    x: Tensor
    timesteps: Tensor
    text: Tensor
    names: tuple[str, ...]
    image: Tensor | None = None


def build_call(
    shape: WanShape,
    mesh: str,
    *,
    batch: int = 4,
    size: tuple[int, int, int] = (3, 6, 6),
    texts: str = "abab",
    seed: int = 1,
) -> Call:
    """A batch whose samples differ in text and timestep; with frames of their own where the model has such."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator)

    # A text follows from its letter alone.
    by_letter = {
        letter: torch.randn(
            TEXT_TOKENS, shape.text_dim, generator=torch.Generator().manual_seed(ord(letter))
        )
        for letter in texts
    }
    timesteps = torch.linspace(900, 100, batch).unsqueeze(1)
    if shape.has_frame_times:
        factors = torch.ones(batch, size[0])
        factors[:, 0] = 0
        factors[-1, 1] = 0.5
        timesteps = timesteps * factors
    return Call(
        mesh=mesh,
        x=noise(batch, shape.out_dim, *size),
        timesteps=timesteps,
        text=torch.stack([by_letter[letter] for letter in texts[:batch]]),
        names=tuple(texts[:batch]),
        image=noise(batch, shape.image_dim, *size) if shape.image_dim else None,
    )


def build_forward_request(spec: ModelSpec, call: Call) -> tuple[ForwardRequest, list[Tensor]]:
    """The request and the tensors that its refs name; the last one is the result."""
    tensors: list[Tensor] = []

    def sent(tensor: Tensor) -> TensorRef:
        tensors.append(tensor)
        return TensorRef(
            buffer=len(tensors) - 1, offset=0, dtype="float32", shape=tuple(tensor.shape)
        )

    conditions = tuple[Condition, ...]()
    if call.image is not None:
        conditions = (Condition(name="image", branch=COND, tensor=sent(call.image)),)
    request = ForwardRequest(
        id="local",
        model=spec,
        mesh=call.mesh,
        x=sent(call.x),
        timesteps=sent(call.timesteps),
        text=sent(call.text),
        prompts=call.names,
        conditions=conditions,
        result=sent(torch.full_like(call.x, float("nan"))),
    )
    return request, tensors


def whole_velocity(parts: Sequence[Tensor]) -> Tensor:
    """What the ranks have written together, NaN where a rank has not. No place may be left out or written twice."""
    written = torch.stack(list(parts))
    assert bool((written.isfinite().sum(0) == 1).all())
    return written.nan_to_num().sum(0)


def calls_rank(rank: int, plane: str, spec: ModelSpec, calls: tuple[Call, ...]) -> list[Tensor]:
    """What the rank wrote for one call after the other, in a plane that was started for a mesh; NaN elsewhere."""
    runner, agreement = build_local_runner(rank, plane)
    velocities = []
    for call in calls:
        request, tensors = build_forward_request(spec, call)
        runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
        velocities.append(tensors[-1])
    return velocities
