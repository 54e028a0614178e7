"""Single forwards for ComfyUI's own samplers, each a job of its own: x and timesteps to a velocity.

A sampler calls in a thread whose event loop it holds up, so the job has a loop of its own beside it.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..group.queue import Piece
from ..ipc.messages import COND, Condition, ForwardRequest, TensorRef
from ..ipc.shared import KeptTensor, split_ref
from ..mesh.choice import choose_job_mesh, piece_sizes
from ..mesh.degrees import MeshDegrees
from ..mesh.flops import rank_flops
from ..mesh.workload import forward_workload
from .handle import ModelHandle, ResolvedModel
from .session import Session, keep_tensor, open_session, planes_for, resolve

T = TypeVar("T")
MOST_TEXTS = 4
"""In turn are at most the prompt and the negative prompt, where they differ in length, of two samplers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentText:
    """A batch of prompts [B, S, D] that ranks see. given: as it came, on its device. names: of each sample's."""

    given: Tensor
    kept: KeptTensor
    names: tuple[str, ...]


class SentTexts:
    """The texts that were sent last, known again by their values."""

    def __init__(self) -> None:
        self._sent: list[SentText] = []

    def find(self, text: Tensor) -> SentText:
        """`text` where ranks see it: as it was sent before, or sent now."""
        found = next((sent for sent in self._sent if _is_equal(sent.given, text)), None)
        if found is None:
            kept = keep_tensor(text)
            samples = kept.buffer.tensor(kept.ref)
            names = tuple(
                hashlib.blake2b(sample.view(torch.uint8).numpy()).hexdigest() for sample in samples
            )
            found = SentText(given=text.clone(), kept=kept, names=names)
        self._sent = [found, *(sent for sent in self._sent if sent is not found)][:MOST_TEXTS]
        return found


class SamplerRun:
    """The forwards of one run of a sampler, on a model that was checked at its beginning."""

    def __init__(self, model: ResolvedModel) -> None:
        self._model = model
        self._texts = SentTexts()

    def __call__(self, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """The velocity [B, C, T, h, w] on the CPU of x [B, C + D, T, h, w] with D channels of conditions.

        timesteps [B] or [B, T]; text [B, S, text_dim]; all float32. Raises what the ranks raise.
        """
        times = timesteps.reshape(x.shape[0], -1)
        return _beside(_predict(self._model, x, times, self._texts.find(text)))


def open_run(handle: ModelHandle) -> SamplerRun:
    """Check the handle's files anew. Raises ModelFileError, MeshError, ConfigError."""
    return SamplerRun(resolve(handle))


async def _predict(model: ResolvedModel, x: Tensor, timesteps: Tensor, text: SentText) -> Tensor:
    planes = planes_for(model)
    async with open_session(planes) as session:
        result = session.reserve((x.shape[0], model.shape.out_dim, *x.shape[2:]))
        requests = _build_requests(session, model, x, timesteps, text, result)
        await session.run([_build_piece(each, model, planes[0].degrees) for each in requests])
        return session.tensor(result)


def _build_requests(
    session: Session,
    model: ResolvedModel,
    x: Tensor,
    timesteps: Tensor,
    text: SentText,
    result: TensorRef,
) -> list[ForwardRequest]:
    """One for each piece of the batch. result: for all of it."""
    sizes = piece_sizes(model.degrees, batch=x.shape[0])
    kinds = [kind for kind in model.shape.conditions if kind.channels and kind.on_tokens]
    parts = x.split([model.shape.out_dim, *(kind.channels for kind in kinds)], dim=1)
    own_x, *conditions = (session.send_split(part, sizes) for part in parts)
    own_times = session.send_split(timesteps, sizes)
    own_text = split_ref(session.lend(text.kept), sizes)
    results = split_ref(result, sizes)
    names = iter(text.names)
    return [
        ForwardRequest(
            id=f"{session.id}-{index}",
            model=model.spec,
            mesh="",
            x=own_x[index],
            timesteps=own_times[index],
            text=own_text[index],
            prompts=tuple(islice(names, size)),
            result=results[index],
            conditions=tuple(
                Condition(name=kind.name, branch=COND, tensor=own[index])
                for kind, own in zip(kinds, conditions, strict=True)
            ),
        )
        for index, size in enumerate(sizes)
    ]


def _build_piece(request: ForwardRequest, model: ResolvedModel, plane: MeshDegrees) -> Piece:
    """The request on the mesh of the plane that suits it best."""
    job = forward_workload(request, model.shape)
    mesh = choose_job_mesh(plane, job, is_auto=model.is_auto, device_memory=model.device_memory)
    return Piece(
        request=replace(request, mesh=str(mesh)),
        cost=rank_flops(job, MeshDegrees(), 0).job(job.steps),
        is_one_of_many=True,
    )


def _beside(work: Coroutine[Any, Any, T]) -> T:
    """Have a coroutine done while this thread waits, whose own event loop may be in the middle of something.

    What it calls of ComfyUI takes it for this thread's node.
    """
    context = contextvars.copy_context()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward") as beside:
        return beside.submit(context.run, asyncio.run, work).result()


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
