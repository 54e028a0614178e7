"""Whether a file has the tensors of a model: those that tell its sizes, and then exactly those that these ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ipc.errors import ModelFileError
from .names import listed

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """shapes: of a file's tensors, by official name. For messages: its label, what model it should be, and a remedy."""

    shapes: Shapes
    label: str
    model: str
    remedy: str

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Shape of a tensor that every such model has. Raises ModelFileError if it is not there or has other dims."""
        if name not in self.shapes:
            raise ModelFileError(
                f"{self.label} lacks the tensor {name}; it may be incomplete: {self.remedy}"
            )
        if len(self.shapes[name]) != dims:
            raise self.misshapen(name, f"it must have {dims} dims")
        return self.shapes[name]

    def require(self, expected: Shapes) -> None:
        """Raises ModelFileError unless the tensors are the expected ones."""
        if missing := sorted(expected.keys() - self.shapes.keys()):
            raise ModelFileError(
                f"{self.label} lacks {len(missing)} tensors, the first is {missing[0]}; it may be incomplete: "
                f"{self.remedy}"
            )
        if extra := sorted(self.shapes.keys() - expected.keys()):
            raise ModelFileError(
                f"{self.label} has {len(extra)} tensors that {self.model} does not have, {listed(extra)}; it is "
                f"another kind of model: {self.remedy}"
            )
        for name, shape in expected.items():
            if self.shapes[name] != shape:
                raise self.misshapen(name, f"its other tensors ask for {list(shape)}")

    def misshapen(self, name: str, allowed: str) -> ModelFileError:
        return ModelFileError(
            f"{self.label}: {name} has shape {list(self.shapes[name])}; {allowed}: {self.remedy}"
        )
