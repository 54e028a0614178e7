"""Requests that may share a run, and what a plane that is no process makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comfy_wan_dist.ipc.messages import (
    COND,
    UNCOND,
    Condition,
    ModelSpec,
    SampleRequest,
)
from comfy_wan_dist.ipc.shared import Parcel

LATENT = (3, 2, 4, 4)
TENSOR_OPTIONS = (
    "clean",
    "mask",
    "frame_mask",
    "uncond",
    "conditions.0",
    "conditions.1",
    "conditions.2",
    "step_noise",
)
CONDITIONS = {
    "conditions.0": ("image", COND),
    "conditions.1": ("image", UNCOND),
    "conditions.2": ("other", COND),
}
BATCH_DIMS = {
    "noisy": 0,
    "clean": 0,
    "mask": 0,
    "frame_mask": 0,
    "cond": 0,
    "uncond": 0,
    "step_noise": 1,
    "result": 0,
    "conditions.0": 0,
    "conditions.1": 0,
    "conditions.2": 1,
}
STEPS = 4


def make_tensors(
    seed: int,
    *,
    batch: int = 1,
    latent: Sequence[int] = LATENT,
    tokens: int = 5,
    text_batch: int = 1,
    leave_out: Sequence[str] = (),
) -> dict[str, Tensor]:
    """What a sampler node would send, by the names of the request's fields."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = {
        "noisy": noise(batch, *latent),
        "clean": noise(batch, *latent),
        "mask": noise(batch, 1, *latent[1:]),
        "frame_mask": noise(batch, latent[1]),
        "cond": noise(text_batch, tokens, 8),
        "uncond": noise(text_batch, tokens, 8),
        "conditions.0": noise(text_batch, 5, *latent[1:]),
        "conditions.1": noise(text_batch, 5, *latent[1:]),
        "conditions.2": noise(2, text_batch, 3),
        "step_noise": noise(STEPS - 1, batch, *latent),
    }
    return {name: tensor for name, tensor in made.items() if name not in leave_out}


def make_request(id: str, tensors: dict[str, Tensor], parcel: Parcel) -> SampleRequest:
    """Each tensor in a buffer of its own, after one that the request does not name."""
    parcel.pack([torch.zeros(3)])
    sent = {name: parcel.pack([tensor])[0] for name, tensor in tensors.items()}
    refs: dict[str, Any] = dict.fromkeys(name for name in TENSOR_OPTIONS if "." not in name)
    refs |= {name: ref for name, ref in sent.items() if "." not in name}
    return SampleRequest(
        id=id,
        model=ModelSpec(path="m", file_bytes=1, mtime_ns=1, dtype="float32", compile=False),
        mesh="pp2",
        solver="lcm",
        sigmas=(1.0, 0.9, 0.7, 0.4, 0.0),
        timesteps=(1000.0, 900.0, 700.0, 400.0),
        start=1.0,
        guidance=5.0,
        result=parcel.reserve(tensors["noisy"].shape, torch.float32),
        conditions=tuple(
            Condition(name=kind, branch=branch, tensor=sent[name], batch_dim=BATCH_DIMS[name])
            for name, (kind, branch) in CONDITIONS.items()
            if name in sent
        ),
        **refs,
    )


def sampled(tensors: dict[str, Tensor]) -> Tensor:
    """Depends on every tensor, and for each sample on its own part only."""
    batch = tensors["noisy"].shape[0]
    total = torch.zeros(batch)
    for weight, name in enumerate(BATCH_DIMS, 2):
        if name not in tensors:
            continue
        tensor = tensors[name]
        rows = tensor.movedim(BATCH_DIMS[name], 0).expand(
            batch, *tensor.movedim(BATCH_DIMS[name], 0).shape[1:]
        )
        total = total + weight * rows.flatten(1)[:, -1]
    return tensors["noisy"] + total.view(-1, 1, 1, 1, 1)
