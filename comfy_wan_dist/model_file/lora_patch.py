"""One change of one parameter: how its tensors make it, whether they suit each other, and its size.

Source: the formulas of the LoRA (arXiv 2106.09685), LyCORIS (2309.14859) and DoRA (2402.09353) papers as ComfyUI
applies them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite, prod

from ..ipc.errors import ModelFileError
from .encoding import TensorEntry
from .lora_names import Role
from .names import shown


class Kind(enum.Enum):
    """How the new value of a parameter follows from the old one."""

    LORA = "LoRA"
    LOHA = "LoHa"
    LOKR = "LoKr"
    DIFFERENCE = "a difference"
    VALUE = "a whole value"


PARTS: dict[Kind, tuple[Role, ...]] = {
    Kind.LORA: (Role.DOWN, Role.UP),
    Kind.LOHA: (Role.HADA_W1_A, Role.HADA_W1_B, Role.HADA_W2_A, Role.HADA_W2_B),
    Kind.LOKR: (
        Role.LOKR_W1,
        Role.LOKR_W1_A,
        Role.LOKR_W1_B,
        Role.LOKR_W2,
        Role.LOKR_W2_A,
        Role.LOKR_W2_B,
    ),
    Kind.DIFFERENCE: (Role.DIFFERENCE,),
    Kind.VALUE: (Role.VALUE,),
}
PAIRS = (
    (Role.UP, Role.DOWN),
    (Role.HADA_W1_A, Role.HADA_W1_B),
    (Role.HADA_W2_A, Role.HADA_W2_B),
    (Role.LOKR_W1_A, Role.LOKR_W1_B),
    (Role.LOKR_W2_A, Role.LOKR_W2_B),
)
"""Two factors of a product each: [rows, rank] and [rank, columns]."""
RANKS = {
    Kind.LORA: (Role.DOWN,),
    Kind.LOHA: (Role.HADA_W1_B,),
    Kind.LOKR: (Role.LOKR_W2_B, Role.LOKR_W1_B),
}
"""The first that is there has as many rows as alpha is divided by."""
FORMS = {
    Kind.LOHA: ((Role.HADA_W1_A,), (Role.HADA_W2_A,)),
    Kind.LOKR: ((Role.LOKR_W1, Role.LOKR_W1_A), (Role.LOKR_W2, Role.LOKR_W2_A)),
}
"""What each of the two matrices of LoHa and of LoKr may come as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """A tensor of the file and its name there."""

    name: str
    entry: TensorEntry

    @property
    def rows(self) -> int:
        return self.entry.shape[0]

    @property
    def columns(self) -> int:
        """Columns of the tensor as a matrix: all dims but the first are one."""
        return prod(self.entry.shape[1:])


class DoraAxis(enum.Enum):
    """What DoRA scales to a length: each row of the weight, or each column, of a convolution each input channel."""

    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """The change of one parameter by one file. scale: what it is multiplied with besides the strength.

    is_reshaped: its values, row after row, are the parameter's, which has other rows.
    """

    kind: Kind
    factors: Mapping[Role, Factor]
    scale: float
    dora: DoraAxis | None = None
    is_reshaped: bool = False


def build_patch(
    kind: Kind,
    factors: Mapping[Role, Factor],
    *,
    label: str,
    alpha: float | None,
    read_scalar: Callable[[TensorEntry], float],
) -> Patch:
    """The change that `factors` make. Raises ModelFileError if they do not go together.

    alpha: of a low-rank pair that has none. read_scalar: the value of a tensor with one element.
    """
    for left, right in PAIRS:
        if (left in factors) != (right in factors):
            given, other = (left, right) if left in factors else (right, left)
            raise ModelFileError(
                f"{label} has {shown(factors[given].name)} without its {other.value}; the file is incomplete: "
                "download it again"
            )
        if left in factors:
            _require_product(factors[left], factors[right], label, kind)
    if kind in (Kind.LOHA, Kind.LOKR):
        _require_forms(kind, factors, label)
    rank = next((factors[role].rows for role in RANKS.get(kind, ()) if role in factors), None)
    value = alpha if kind is Kind.LORA else None
    # A product of two whole matrices has no rank, and alpha, which may be anything then, no say.
    if rank is not None and (own_alpha := factors.get(Role.ALPHA)) is not None:
        value = _alpha(own_alpha, label, read_scalar)
    scale = 1.0 if rank is None or value is None else value / rank
    matrices = {**factors}
    matrices.pop(Role.ALPHA, None)
    patch = Patch(kind=kind, factors=matrices, scale=scale)
    dora = factors.get(Role.DORA)
    return patch if dora is None else replace(patch, dora=_dora_axis(dora, patch, label))


def _require_product(left: Factor, right: Factor, label: str, kind: Kind) -> None:
    for factor in (left, right):
        dims = len(factor.entry.shape)
        if dims < 2 or (dims > 2 and kind is not Kind.LORA):
            raise ModelFileError(
                f"{label}: {shown(factor.name)} has shape {list(factor.entry.shape)}; a factor must be a matrix, so "
                "the file is damaged"
            )
    if left.columns != right.rows or not right.rows:
        raise ModelFileError(
            f"{label}: {shown(left.name)} has rank {left.columns} but {shown(right.name)} has rank {right.rows}; "
            "they must be equal and not 0, so the file is damaged"
        )


def _require_forms(kind: Kind, factors: Mapping[Role, Factor], label: str) -> None:
    """Both matrices of a Hadamard or Kronecker product must be there, in one form each."""
    name = shown(next(iter(factors.values())).name)
    for forms in FORMS[kind]:
        given = [role for role in forms if role in factors]
        if len(given) != 1:
            how = "twice" if given else "nowhere"
            raise ModelFileError(
                f"{label}: the change that {name} belongs to has {forms[0].value} {how}; the file is damaged: "
                "download it again"
            )
        if len(factors[given[0]].entry.shape) != 2:
            raise ModelFileError(
                f"{label}: {shown(factors[given[0]].name)} has shape {list(factors[given[0]].entry.shape)}; this "
                "version merges Kronecker products of matrices only, so choose another file"
            )


def _alpha(factor: Factor, label: str, read_scalar: Callable[[TensorEntry], float]) -> float:
    if prod(factor.entry.shape) != 1:
        raise ModelFileError(
            f"{label}: {shown(factor.name)} has shape {list(factor.entry.shape)}; it must be one number, so the "
            "file is damaged"
        )
    value = read_scalar(factor.entry)
    if not isfinite(value):
        raise ModelFileError(
            f"{label}: {shown(factor.name)} is {value}; it must be finite, so the file is damaged"
        )
    return value


def _dora_axis(dora: Factor, patch: Patch, label: str) -> DoraAxis:
    rows, columns = extent(patch)
    if len(dora.entry.shape) >= 2:
        if (dora.rows, dora.columns) == (rows, 1):
            return DoraAxis.ROWS
        # Of a convolution one number stands for the columns of an input channel, but none for all of them.
        is_row = dora.rows == 1 and dora.columns == dora.entry.shape[1]
        if is_row and (dora.columns == columns or _is_part(dora.columns, columns)):
            return DoraAxis.COLUMNS
    raise ModelFileError(
        f"{label}: {shown(dora.name)} has shape {list(dora.entry.shape)}; for a change of {rows} x {columns} it must "
        f"be {[rows, 1]} or {[1, columns]}"
    )


def _is_part(part: int, whole: int) -> bool:
    return part > 1 and whole % part == 0


def extent(patch: Patch) -> tuple[int, int]:
    """Rows and columns of what the patch changes."""

    def product(left: Role, right: Role) -> tuple[int, int]:
        return patch.factors[left].rows, patch.factors[right].columns

    if patch.kind is Kind.LORA:
        return product(Role.UP, Role.DOWN)
    if patch.kind is Kind.LOHA:
        return product(Role.HADA_W1_A, Role.HADA_W1_B)
    if patch.kind is Kind.LOKR:
        (r1, c1), (r2, c2) = (
            (patch.factors[whole].rows, patch.factors[whole].columns)
            if whole in patch.factors
            else product(left, right)
            for whole, left, right in (
                (Role.LOKR_W1, Role.LOKR_W1_A, Role.LOKR_W1_B),
                (Role.LOKR_W2, Role.LOKR_W2_A, Role.LOKR_W2_B),
            )
        )
        return r1 * r2, c1 * c2
    (factor,) = patch.factors.values()
    return (factor.rows, factor.columns) if factor.entry.shape else (1, 1)
