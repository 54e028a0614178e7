"""What the ranks of the test pool run for single forwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from rank_programs import no_fault
from torch import Tensor

from comfy_wan_dist.ipc.errors import WanDistError
from comfy_wan_dist.ipc.messages import LedgerLine, ModelSpec
from devtools.forward_runs import Call, build_forward_request
from devtools.mesh_runs import LocalJob, build_local_runner
from workers.model import tokens
from workers.model.wan import WanModel
from workers.resident.prompts import EncodedPrompts
from workers.resident.ropes import RopeTables
from workers.resident.transformers import Transformers

Fault = Callable[[], AbstractContextManager[Any]]


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


def one_rank_is_not_ready() -> AbstractContextManager[Any]:
    """No mistake: memory was short on one rank only, say, so that its weights are in host memory."""
    ready = Transformers.ready

    def own(self: Transformers, spec: ModelSpec) -> Any:
        return None if self._plane.rank == 1 else ready(self, spec)

    return mock.patch.object(Transformers, "ready", own)


def texts_in_another_order() -> AbstractContextManager[Any]:
    """Each sample gets its neighbour's text."""
    encode = WanModel.encode_text

    def turned(self: WanModel, text: Tensor, *others: Any) -> Any:
        return encode(self, text.roll(1, 0), *others)

    return mock.patch.object(WanModel, "encode_text", turned)
