"""Votes: every rank leaves with the same answer, whatever only one of them has seen."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from comfy_wan_dist.ipc.errors import (
    ConfigError,
    InsufficientMemoryError,
    JobCancelled,
    ModelFileError,
    RemoteError,
)
from devtools.rank_pool import RankPool
from workers.parallel.agreement import Agreement, _pack_report, _unpack_report


class FileGone(InsufficientMemoryError):
    """A subclass that the other side does not know."""


def describe(error: Exception | None) -> tuple[str, str, int, bool]:
    if error is None:
        return "None", "", -1, False
    rank = error.rank if isinstance(error, RemoteError) else -1
    return type(error).__name__, str(error), rank, "Traceback" in getattr(error, "traceback", "")


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def vote(rank: int, errors: tuple[Exception | None, ...]) -> tuple[str, str, int, bool]:
    agreement = world_agreement(rank)
    error = errors[rank]
    shared: Exception | None = None
    try:
        agreement.agree(error and raised(error))
    except Exception as caught:
        shared = caught
    failure = agreement.take_failure()
    assert (failure.error if failure else None) is shared
    assert agreement.take_failure() is None
    assert agreement.agree_stop(False) is False  # still in step
    return describe(shared)


def world_agreement(rank: int) -> Agreement:
    return Agreement(rank=rank, size=dist.get_world_size(), group=dist.group.WORLD)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ((None, None, None), ("None", "")),
        ((None, ConfigError("no"), None), ("ConfigError", "no")),
        ((JobCancelled("stop"), None, ConfigError("no")), ("ConfigError", "no")),
        ((None, JobCancelled("stop"), None), ("JobCancelled", "stop")),
        ((None, ConfigError("first"), ConfigError("second")), ("ConfigError", "first")),
        (
            (None, None, InsufficientMemoryError("\u00e4" * 9000)),
            ("InsufficientMemoryError", "\u00e4" * 4096),
        ),
        ((KeyError("odd"), None, None), ("RemoteError", "rank 0: KeyError: 'odd'")),
    ],
)
def test_agree_raises_one_error_on_every_rank(
    rank_pool: RankPool, errors: tuple[Exception | None, ...], expected: tuple[str, str]
) -> None:
    answers = rank_pool.run(3, vote, errors)
    for rank, (name, message, origin, has_traceback) in enumerate(answers):
        assert name == expected[0]
        # The failing rank keeps its own error, whole.
        if errors[rank] is None or name == "RemoteError":
            assert message == expected[1]
        if name == "RemoteError":
            assert (origin, has_traceback) == (0, True)


def stop_votes(rank: int) -> list[bool]:
    agreement = world_agreement(rank)
    return [agreement.agree_stop(rank == stopping) for stopping in (-1, 0, 1, -1)]


def test_agree_stop_is_any_and_the_same_on_every_rank(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, stop_votes) == [[False, True, True, False]] * 2


def fail_while_others_vote_on(rank: int) -> str:
    agreement = world_agreement(rank)
    try:
        if rank == 1:
            agreement.agree_end(raised(FileGone("mine alone")), timeout_s=20)
        else:
            agreement.agree_stop(False)
    except InsufficientMemoryError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_failed_is_heard_in_any_vote(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, fail_while_others_vote_on) == ["mine alone"] * 2


def vote_twice(rank: int) -> tuple[str, str, int, bool]:
    agreement = world_agreement(rank)
    shared: Exception | None = None
    for _ in range(2):
        try:
            agreement.agree(shared or (raised(KeyError("odd")) if rank == 1 else None))
        except Exception as caught:
            shared = caught
    failure = agreement.take_failure()
    assert failure is not None
    assert failure.error is shared
    assert (failure.rank, failure.name, failure.message) == (1, "KeyError", "'odd'")
    return describe(shared)


def test_an_error_that_is_voted_on_again_stays_that_of_its_rank(rank_pool: RankPool) -> None:
    answers = rank_pool.run(2, vote_twice)
    assert answers == [("RemoteError", "rank 1: KeyError: 'odd'", 1, True)] * 2


def run_apart(rank: int) -> str:
    agreement = world_agreement(rank)
    try:
        agreement.agree_stop(True) if rank else agreement.agree(None)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_vote_on_different_things_are_told(rank_pool: RankPool) -> None:
    assert all("run apart" in answer for answer in rank_pool.run(2, run_apart))


def wait_for_nobody(rank: int) -> float:
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError):
            world_agreement(rank).agree_end(ConfigError("x"), timeout_s=0.3)
    else:
        time.sleep(1.0)
    return time.monotonic() - started


def test_agree_end_does_not_wait_for_ever(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, wait_for_nobody)[0] < 0.9


def test_agreement_of_one_needs_no_group() -> None:
    agreement = Agreement(rank=0, size=1, group=None)
    agreement.agree(None)
    assert agreement.agree_stop(True) is True
    assert agreement.agree_stop(False) is False
    with pytest.raises(ConfigError, match="no"):
        agreement.agree(ConfigError("no"))
    with pytest.raises(RemoteError, match="odd") as caught:
        agreement.agree(raised(KeyError("odd")))
    assert "KeyError" in caught.value.traceback
    with pytest.raises(ValueError, match="group"):
        Agreement(rank=0, size=2, group=None)


def test_error_that_names_a_path_of_any_bytes_can_be_reported() -> None:
    agreement = Agreement(rank=0, size=1, group=None)
    with pytest.raises(ModelFileError, match="odd"):
        agreement.agree(ModelFileError("odd \udcff name"))
    name, message, _ = _unpack_report(_pack_report(ModelFileError("odd \udcff name")))
    assert (name, message) == ("ModelFileError", "odd \\udcff name")
