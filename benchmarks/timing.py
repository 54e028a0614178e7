"""Interleaved timing of things that are compared, and the verdict on a limit.

The things run in turns in the same processes, so what slows the machine slows all of them; what is judged is the
ratio of two times of one round. A verdict is given once a one-sided sign test says on which side of the limit the
median ratio lies; until then rounds are added, up to a budget of measured time.

Not covered: a bias between neighbours of one round, such as a cache that one fills for the next. Every second round
runs in reverse order against that.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

ERROR_LEVEL = 0.02
"""How often a verdict may be wrong; six rounds that agree are enough for it."""
FEWEST_ROUNDS = 6

TOO_NOISY = "the machine was too noisy for a verdict"

Times = Mapping[str, Sequence[float]]
"""Seconds of every round by the name of what ran; all lists are equally long."""


class Sense(enum.Enum):
    AT_MOST = "at most"
    """The ratio is ours / other and must not exceed the limit."""
    AT_LEAST = "at least"
    """The ratio is other / ours, a share that must reach the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A row to be: two of the things timed. `other_part` scales the other's time, where it does more than ours."""

    case: str
    ours: str
    other: str
    limit: float | None
    sense: Sense = Sense.AT_MOST
    other_part: float = 1.0
    note: str = ""

    def ratios(self, times: Times) -> list[float]:
        pairs = zip(times[self.ours], times[self.other], strict=True)
        if self.sense is Sense.AT_MOST:
            return [ours / (other * self.other_part) for ours, other in pairs]
        return [other * self.other_part / ours for ours, other in pairs]

    def is_met(self, times: Times) -> bool | None:
        """Whether the median ratio keeps the limit; None while the rounds do not tell, or without a limit."""
        if self.limit is None:
            return None
        is_below = median_is_below(self.ratios(times), self.limit)
        if is_below is None or self.sense is Sense.AT_MOST:
            return is_below
        return not is_below


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of bench.json. `ok` is None without a limit or a verdict."""

    section: str
    case: str
    ours_s: float | None
    other_s: float | None
    ratio: float | None
    limit: float | None
    ok: bool | None
    sense: str = Sense.AT_MOST.value
    rounds: int = 0
    note: str = ""


def median_is_below(ratios: Sequence[float], limit: float) -> bool | None:
    """Sign test: on which side of `limit` the median lies; None if chance could have done it."""
    below = sum(ratio <= limit for ratio in ratios)
    if _chance_of_at_least(below, len(ratios)) <= ERROR_LEVEL:
        return True
    if _chance_of_at_least(len(ratios) - below, len(ratios)) <= ERROR_LEVEL:
        return False
    return None


def _chance_of_at_least(count: int, rounds: int) -> float:
    """Probability of `count` or more heads in `rounds` throws of a coin."""
    heads: int = sum(comb(rounds, k) for k in range(count, rounds + 1))
    return heads / float(2**rounds)


def interleave(
    things: Mapping[str, Callable[[], float]],
    comparisons: Sequence[Comparison],
    *,
    budget_s: float,
    max_rounds: int = 60,
) -> dict[str, list[float]]:
    """Run `things`, each returning its seconds, in rounds until every limit has a verdict.

    The first round warms up and is not counted. Stops early when the measured seconds exceed `budget_s`, but not before
    a verdict was possible. On ranks, every rank decides alike as long as the things return the same seconds on all of
    them.
    """
    names = list(things)
    spent = sum(things[name]() for name in names)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(max_rounds):
        for name in names if index % 2 == 0 else reversed(names):
            times[name].append(things[name]())
            spent += times[name][-1]
        limited = [comparison for comparison in comparisons if comparison.limit is not None]
        has_enough = all(comparison.is_met(times) is not None for comparison in limited)
        if index + 1 >= FEWEST_ROUNDS and (has_enough or spent > budget_s):
            break
    return times


def build_row(section: str, comparison: Comparison, times: Times) -> Row:
    is_met = comparison.is_met(times)
    notes = [comparison.note] if comparison.note else []
    if comparison.limit is not None and is_met is None:
        low, high = min(comparison.ratios(times)), max(comparison.ratios(times))
        notes.append(f"{TOO_NOISY}: ratios {low:.3f} to {high:.3f}")
    return Row(
        section=section,
        case=comparison.case,
        ours_s=median(times[comparison.ours]),
        other_s=median(times[comparison.other]) * comparison.other_part,
        ratio=median(comparison.ratios(times)),
        limit=comparison.limit,
        ok=is_met,
        sense=comparison.sense.value,
        rounds=len(times[comparison.ours]),
        note="; ".join(notes),
    )
