"""What a launcher and its ranks are told on their command lines, spelled once for both sides. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from .tcp import Address, parse_address

O = TypeVar("O", bound="RankOptions")  # noqa: E741

READ: dict[str, Callable[[str], Any]] = {
    "int": int,
    "Path": Path,
    "Address": parse_address,
    "str": str,
}
"""How a flag's text becomes a field of that annotation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """A rank's.

    folder: the group's private one. device: cpu or cuda. runner: `module:function`. store: of torch, for several
    machines. report: where a rank of another machine says hello. models: where that machine looks for files by name.
    """

    folder: Path
    device: str
    mesh: str
    runner: str
    store: Address | None = None
    report: Address | None = None
    models: Path | None = None

    def argv(self) -> list[str]:
        """Flags and their values; what is None is left out."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return [
            part
            for name, value in given.items()
            if value is not None
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]

    @classmethod
    def parse(cls: type[O], arguments: Sequence[str] | None = None) -> O:
        """The options of a command line, by default this process's. Exits with a message for one that is not right."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        for each in fields(cls):
            kind, _, optional = str(each.type).partition(" | ")
            parser.add_argument(
                f"--{each.name.replace('_', '-')}",
                type=READ[kind],
                required=not optional,
                choices=("cpu", "cuda") if each.name == "device" else None,
            )
        values: dict[str, Any] = vars(parser.parse_args(arguments))
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherOptions(RankOptions):
    """A launcher's, with those of its ranks.

    lifeline: a descriptor that ends when the client does. client: its process. ranks: on this machine. machines,
    machine: how many there are, and which one this is. store_listener: the head's socket for the store, a descriptor.
    """

    lifeline: int
    client: int
    ranks: int
    machines: int
    machine: int
    store_listener: int | None = None

    def for_ranks(self) -> RankOptions:
        return RankOptions(**{each.name: getattr(self, each.name) for each in fields(RankOptions)})
