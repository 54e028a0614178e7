"""Single forwards for ComfyUI's own samplers, each a job of its own: x and timesteps to a velocity.

A sampler calls in the thread of ComfyUI's nodes, whose event loop it holds up; the calling thread waits.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from ..comfyui.patches import CarriedPatches
from ..group.queue import Piece
from ..ipc.errors import ConfigError
from ..ipc.messages import COND, Condition, ForwardRequest, TensorRef
from ..ipc.shared import KeptTensor, split_ref
from ..mesh.choice import choose_job_mesh, piece_sizes
from ..mesh.degrees import MeshDegrees
from ..mesh.flops import rank_flops
from ..mesh.workload import forward_workload
from ..model_file.memory_file import MemoryFile, write_memory_file
from .beside import LoopBeside
from .handle import HIGH_NOISE, LOW_NOISE, ModelHandle, ResolvedModel
from .session import Session, keep_tensor, open_session, planes_for, resolve

logger = logging.getLogger("comfy_wan_dist")
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
    """The forwards of one run of a sampler, on a model that was checked at its beginning.

    loras: files in memory that the model names; they are there as long as this is.
    """

    def __init__(
        self, model: ResolvedModel, texts: SentTexts, loras: Sequence[MemoryFile] = ()
    ) -> None:
        self._model = model
        self._texts = texts
        self._loras = loras
        self._loop = LoopBeside()
        self._meshes: Counter[str] = Counter()
        self._seconds = 0.0

    def __call__(self, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """The velocity [B, C, T, h, w] on the CPU of x [B, C + D, T, h, w] with D channels of conditions.

        timesteps [B] or [B, T], or one for all of B; text [B, S, text_dim]; all float32. Raises what the ranks raise.
        """
        batch = x.shape[0]
        if timesteps.shape[0] == 1:
            timesteps = timesteps.expand(batch, *timesteps.shape[1:])
        return self._predict(x, timesteps.reshape(batch, -1), self._texts.find(text))

    def close(self) -> None:
        """Nothing is asked for any more."""
        self._loop.close()
        meshes = " and ".join(f"{count} on mesh {mesh}" for mesh, count in self._meshes.items())
        logger.info(
            "[wan-dist] a sampler's forwards: %s; %.2f s in the ranks",
            meshes or "none",
            self._seconds,
        )

    def _predict(self, x: Tensor, timesteps: Tensor, text: SentText) -> Tensor:
        model = self._model
        planes = planes_for(model)
        with open_session(planes, self._loop) as session:
            result = session.reserve((x.shape[0], model.shape.out_dim, *x.shape[2:]))
            requests = _build_requests(session, model, x, timesteps, text, result)
            pieces = [_build_piece(request, model, planes[0].degrees) for request in requests]
            outcomes = session.run_blocking([piece for piece, _ in pieces])
            self._meshes.update(str(mesh) for _, mesh in pieces)
            self._seconds += max(answer.seconds for each in outcomes for answer in each.answers)
            return session.tensor(result)


class SamplerRuns:
    """Opens the runs of samplers on one MODEL, and keeps from one to the next what they have sent."""

    def __init__(self, handle: ModelHandle, *, expert: str) -> None:
        """expert: of a model that has two, the one that predicts, HIGH_NOISE or LOW_NOISE. Raises ConfigError."""
        if expert not in (HIGH_NOISE, LOW_NOISE):
            raise ConfigError(
                f"the MODEL's expert is {expert!r}; choose {HIGH_NOISE!r} or {LOW_NOISE!r}"
            )
        self._handle = handle
        self._expert = expert
        self._texts = SentTexts()
        self._written: object = None
        self._loras: tuple[MemoryFile, ...] = ()

    def __call__(self, patches: CarriedPatches) -> SamplerRun:
        """Check the handle's files anew, with `patches` as LoRAs behind its own.

        Raises ModelFileError, MeshError, ConfigError.
        """
        if patches.files and self._handle.machines > 1:
            raise ConfigError(
                "LoRAs of ComfyUI's own loaders reach the ranks of one machine only; use Wan Dist LoRA, with its file "
                "on each machine"
            )
        if patches.key != self._written:
            self._loras = tuple(write_memory_file(each.tensors) for each in patches.files)
            self._written = patches.key
        handle = self._handle
        for lora, file in zip(self._loras, patches.files, strict=True):
            handle = handle.with_lora(lora.path, file.strength)
        model = resolve(handle)
        if self._expert == LOW_NOISE and model.low_noise is not None:
            model = replace(model, spec=model.low_noise)
        for line in model.lora_lines[len(self._handle.loras) :]:
            logger.info("[wan-dist] LoRA %s", line)
        return SamplerRun(model, self._texts, self._loras)


def _build_requests(
    session: Session,
    model: ResolvedModel,
    x: Tensor,
    timesteps: Tensor,
    text: SentText,
    result: TensorRef,
) -> list[ForwardRequest]:
    """One for each piece of the batch, for whatever mesh. result: of the whole batch."""
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
            mesh=str(MeshDegrees()),
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


def _build_piece(
    request: ForwardRequest, model: ResolvedModel, plane: MeshDegrees
) -> tuple[Piece, MeshDegrees]:
    """The request on the mesh of the plane that suits it best, and that mesh."""
    job = forward_workload(request, model.shape)
    mesh = choose_job_mesh(plane, job, is_auto=model.is_auto, device_memory=model.device_memory)
    piece = Piece(
        request=replace(request, mesh=str(mesh)),
        cost=rank_flops(job, MeshDegrees(), 0).job(job.steps),
        is_one_of_many=True,
    )
    return piece, mesh


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
