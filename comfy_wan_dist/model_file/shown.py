"""Names and values out of a file in a message: on one line and short, whatever they are."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence


def shown(value: object) -> str:
    """As Python writes it, cut in the middle where it is long."""
    brief = reprlib.Repr()
    brief.maxstring, brief.maxlist, brief.maxlevel = 100, 16, 2
    return brief.repr(value)


def listed(names: Sequence[str], *, most: int = 3) -> str:
    """The first few of `names`, and how many more there are."""
    more = len(names) - most
    return ", ".join(map(shown, names[:most])) + (f" and {more} more" if more > 0 else "")
