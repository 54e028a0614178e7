"""Loads of a rank that reads alone."""

from __future__ import annotations

from workers.checkpoint.sharing import ReadGroups
from workers.parallel.collectives import lone_rank


def pass_by(done: int, total: int, error: Exception | None) -> None:
    """The milestone of a rank alone."""
    if error is not None:
        raise error


def read_alone() -> ReadGroups:
    alone = lone_rank("read")
    return ReadGroups(everyone=alone, replicas=alone, peers=alone)
