"""What the ranks of the test pool run for single forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rank_programs import no_fault
from torch import Tensor

from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.ipc.messages import (
    COND,
    Condition,
    ForwardRequest,
    LedgerLine,
    ModelSpec,
    TensorRef,
)
from devtools.mesh_runs import LocalJob, build_local_runner
from workers.model import tokens
from workers.model.wan import WanModel
from workers.resident.prompts import EncodedPrompts
from workers.resident.ropes import RopeTables

Fault = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A forward to be asked for on a mesh; names: of each sample's text."""

    mesh: str
    x: Tensor
    timesteps: Tensor
    text: Tensor
    names: tuple[str, ...]
    image: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """velocity: what the rank wrote, NaN elsewhere. encoded: how many texts the rank encoded for it."""

    velocity: Tensor
    ledger: tuple[LedgerLine, ...]
    encoded: int
    error: str


def run_forwards(
    rank: int,
    mesh: str,
    spec: ModelSpec,
    calls: tuple[Call, ...],
    fault: Fault = no_fault,
    machines: int = 1,
) -> list[Answer]:
    """One rank's answers to one call after the other, in a plane that was started for `mesh`."""
    runner, agreement = build_local_runner(rank, mesh, machines=machines)
    answers = []
    encode = WanModel.encode_text
    for call in calls:
        encoded: list[int] = []

        def counted(self: WanModel, text: Tensor, *others: Any, seen: list[int] = encoded) -> Any:
            seen.append(text.shape[0])
            return encode(self, text, *others)

        request, tensors = build_forward_request(spec, call)
        error, ledger = "", tuple[LedgerLine, ...]()
        with mock.patch.object(WanModel, "encode_text", counted), fault():
            try:
                ledger = runner.run(request, LocalJob(tensors, agreement)).ledger  # type: ignore[arg-type]
            except WanDistError as caught:
                error = f"{type(caught).__name__}: {caught}"
                agreement.take_failure()
        answers.append(
            Answer(velocity=tensors[-1], ledger=ledger, encoded=sum(encoded), error=error)
        )
    return answers


def whole_velocity(ranks: Sequence[Answer]) -> Tensor:
    """What the ranks have written together; no place may be left out or written twice."""
    written = torch.stack([answer.velocity for answer in ranks])
    assert bool((written.isfinite().sum(0) == 1).all())
    return written.nan_to_num().sum(0)


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


# ---- mistakes that are easily made


def any_prompt_is_the_last_one() -> AbstractContextManager[Any]:
    """What was encoded once serves whatever is asked for."""
    have = EncodedPrompts.have

    def forgetful(self: EncodedPrompts, names: tuple[str, ...], encode: Any) -> Any:
        return have(self, ("",) * len(names), encode)

    return mock.patch.object(EncodedPrompts, "have", forgetful)


def any_table_is_the_last_one() -> AbstractContextManager[Any]:
    """The rotary table of another part of the tokens."""
    make = RopeTables.__call__

    def shifted(self: RopeTables, grid: Any, start: int, stop: int, *, device: Any) -> Tensor:
        return make(self, grid, 0, stop - start, device=device)

    return mock.patch.object(RopeTables, "__call__", shifted)


def parts_written_at_the_beginning() -> AbstractContextManager[Any]:
    """Each rank takes its tokens for the first ones."""
    boxes = tokens.token_boxes

    def shifted(grid: Any, start: int, stop: int) -> Any:
        return boxes(grid, 0, stop - start)

    return mock.patch.object(tokens, "token_boxes", shifted)


def texts_in_another_order() -> AbstractContextManager[Any]:
    """Each sample gets its neighbour's text."""
    encode = WanModel.encode_text

    def turned(self: WanModel, text: Tensor, *others: Any) -> Any:
        return encode(self, text.roll(1, 0), *others)

    return mock.patch.object(WanModel, "encode_text", turned)
