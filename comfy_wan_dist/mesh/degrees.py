"""Degrees of parallelism and their one spelling.

A mesh is written `single`, `auto`, or axis names with their degrees joined by dashes in the order
dp, cfg, pp, ring, ulysses, tp, then the flags sp and fsdp: `cfg2-ulysses2-tp2`, `tp4-sp`, `ulysses2-fsdp`. Axes left
out have degree 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from ..ipc.errors import MeshError

AXES = ("dp", "cfg", "pp", "ring", "ulysses", "tp")
"""Outermost first: the last axis changes fastest with the rank and gets the fastest link."""

FLAGS = ("sp", "fsdp")
MAX_DEGREE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshDegrees:
    """How many parts each axis makes. Degree 1 means that the axis is not used."""

    dp: int = 1
    cfg: int = 1
    pp: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    sp: bool = False
    """Megatron sequence parallelism: the tp ranks also share the tokens between the cut layers."""
    fsdp: bool = False
    """The replicas of a plane share the blocks' weights and gather each block when it runs."""

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or not 1 <= degree <= MAX_DEGREE:
                raise MeshError(
                    f"the degree of {axis} is {degree!r}; it must be a whole number from 1 to {MAX_DEGREE}"
                )
        if self.cfg > 2:
            raise MeshError(
                f"cfg{self.cfg} is not possible: guidance has two branches (prompt and negative prompt), "
                "so cfg is 1 or 2; use ulysses or tp for more ranks"
            )
        if self.sp and self.tp == 1:
            raise MeshError(
                "sp shares the tokens between the ranks of tp, but tp is 1; write tp2-sp or leave sp out"
            )
        if self.fsdp and self.replicas == 1:
            raise MeshError(
                "fsdp shares the weights between the ranks of cfg, ring and ulysses, but all of these are 1; "
                "write ulysses2-fsdp or leave fsdp out"
            )

    @property
    def cp(self) -> int:
        """Context-parallel degree: into how many shards the tokens are cut."""
        return self.ring * self.ulysses

    @property
    def replicas(self) -> int:
        """Ranks of a plane that have the same part of the weights."""
        return self.cfg * self.cp

    @property
    def plane_size(self) -> int:
        """Ranks of one data-parallel plane, which is one torchrun group."""
        return prod(self.degree(axis) for axis in AXES[1:])

    @property
    def world_size(self) -> int:
        return self.dp * self.plane_size

    def degree(self, axis: str) -> int:
        degree: int = getattr(self, axis)
        return degree

    def __str__(self) -> str:
        parts = [f"{axis}{self.degree(axis)}" for axis in AXES if self.degree(axis) > 1]
        parts += [flag for flag in FLAGS if getattr(self, flag)]
        return "-".join(parts) or "single"


def parse_mesh(text: str) -> MeshDegrees | None:
    """Parse a mesh string; None stands for `auto`.

    Raises MeshError on anything that `str(MeshDegrees)` would not print, except that degrees of 1
    may be written out and capitals and spaces are forgiven.
    """
    cleaned = re.sub(r"\s", "", text).lower()
    if cleaned in ("auto", ""):
        return None
    if cleaned == "single":
        return MeshDegrees()
    degrees: dict[str, int] = {}
    parts = cleaned.split("-")
    flags: list[str] = []
    while len(parts) > 1 and parts[-1] in FLAGS:
        flags.insert(0, parts.pop())
    if flags != [flag for flag in FLAGS if flag in flags]:
        raise MeshError(f"mesh {text!r}: flags go last, each once, in the order {', '.join(FLAGS)}")
    for part in parts:
        match = re.fullmatch(r"([a-z]+)([0-9]{1,6})", part)
        if match is None or match[1] not in AXES:
            raise MeshError(
                f"mesh {text!r}: {part!r} is not an axis with a degree; write auto, single, or axes out of "
                f"{', '.join(AXES)} with their degrees, such as cfg2-ulysses2-tp2, "
                f"with {' and '.join(FLAGS)} last"
            )
        if match[1] in degrees:
            raise MeshError(f"mesh {text!r} names {match[1]} twice; name each axis once")
        degrees[match[1]] = int(match[2])
    if list(degrees) != [axis for axis in AXES if axis in degrees]:
        ordered = "-".join(f"{axis}{degrees[axis]}" for axis in AXES if axis in degrees)
        raise MeshError(f"mesh {text!r}: axes go in the order {', '.join(AXES)}; write {ordered}")
    return MeshDegrees(**degrees, sp="sp" in flags, fsdp="fsdp" in flags)
