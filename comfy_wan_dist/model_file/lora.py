"""What a LoRA file changes in a transformer, read from its header and checked against the model's sizes.

Covers low-rank pairs (LoRA), Hadamard and Kronecker products (LoHa, LoKr), their scaling by DoRA, differences and
whole values. No matrix is read; only the scalars named alpha are. What is known and not made is refused by name, what
is not known or has another size than in this model is listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path

import torch

from ..ipc.errors import ModelFileError
from ..mesh.dtypes import BY_CODE, COMPLEX, FP8, PACKINGS, WIDE_FLOATS
from ..mesh.parameters import expected_parameters
from ..mesh.shape import WanShape
from .encoding import TensorEntry, read_bytes
from .header import ModelFile
from .lora_names import Role, block_of, read_key
from .lora_patch import PARTS, Factor, Kind, Patch, build_patch, extent
from .names import listed, shown

HALVES = ("transformer.", "transformer_2.")
"""How the keys of a file begin that holds LoRAs for two experts: for much noise, and for little."""
FIRST_EXPERT = HALVES[0]
HALF_OF = {begin: begin for begin in HALVES} | {
    f"diffusion_model.transformer_{number}.": half for number, half in enumerate(HALVES, start=1)
}
"""By beginning of a key the half that it is of: diffusers' and ai-toolkit's."""
SHOWN_KEYS = 10
PEFT_METADATA = "lora_adapter_metadata"
UNSUPPORTED_CONFIG = ("alpha_pattern", "use_rslora", "use_dora")
"""Settings of PEFT that change how alpha counts, or what is merged."""
MATRIX_TYPES = (*WIDE_FLOATS, *FP8)
PRODUCTS = (Kind.LORA, Kind.LOHA, Kind.LOKR)
"""What is made of matrices, with a scale. ComfyUI gives the result the parameter's shape."""
ATTENTION = re.compile(r"_attn\.[qkvo]\.weight\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFile:
    """patches: by official name of the parameter. unknown: keys that change nothing here, in the file's order.

    parameters: how many the model has.
    """

    label: str
    patches: Mapping[str, Patch]
    unknown: tuple[str, ...]
    parameters: int

    def describe(self, strength: float, *, most: int = SHOWN_KEYS) -> str:
        """One line: what is changed, and what is left out, of which it names no more than `most` keys."""
        changed = f"{self.label} at strength {strength:g}: {len(self.patches)} of {self.parameters} parameters changed"
        if not self.unknown:
            return changed
        count = f"{len(self.unknown)} keys are" if len(self.unknown) > 1 else "1 key is"
        return (
            f"{changed}; {count} not this model's and left out: {listed(self.unknown, most=most)}"
        )


def read_lora(file: ModelFile, shape: WanShape, *, half: str = "") -> LoraFile:
    """What `file` changes in a model of `shape`. Raises ModelFileError.

    half: of HALVES, the one that this expert takes of a file with both. A model without experts takes the first.
    """
    label = Path(file.path).name
    alpha = default_alpha(file.metadata, label, half=half)
    return parse_lora(
        file.entries, shape, label=label, alpha=alpha, read_scalar=read_scalar, half=half
    )


def default_alpha(metadata: Mapping[str, str], label: str, *, half: str = "") -> float | None:
    """What diffusers' metadata gives to pairs that have no alpha of their own. Raises ModelFileError."""
    raw = metadata.get(PEFT_METADATA)
    if raw is None:
        return None
    try:
        settings = json.loads(raw).items()
        own = half or FIRST_EXPERT
        by_half = {
            begin: {
                key.removeprefix(begin): value for key, value in settings if key.startswith(begin)
            }
            for begin in HALVES
        }
        config = by_half[own] or next(filter(None, by_half.values()), {})
        alpha = config.get("lora_alpha")
        if alpha is None:
            return None
        special = [key for key in UNSUPPORTED_CONFIG if config.get(key)]
        if type(alpha) not in (int, float) or not isfinite(alpha):
            raise ValueError("no number")
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelFileError(
            f"the {PEFT_METADATA} of {label} cannot be read; the file is damaged: download it again"
        ) from error
    if special:
        raise ModelFileError(
            f"{label} was trained with PEFT's {special[0]}, which this version does not merge; choose a LoRA without it"
        )
    return float(alpha)


def parse_lora(
    entries: Mapping[str, TensorEntry],
    shape: WanShape,
    *,
    label: str,
    alpha: float | None,
    read_scalar: Callable[[TensorEntry], float],
    half: str = "",
) -> LoraFile:
    """`read_lora` of a header. Every key of the half is part of a patch or in `unknown`, or ModelFileError is raised.

    alpha: of pairs that have none beside them. read_scalar: the value of a tensor with one element.
    """
    expected = expected_parameters(shape)
    found, scaled, unknown = _find_factors(entries, expected, label, half)
    patches: dict[str, Patch] = {}
    for parameter, roles in found.items():
        kind = _kind_of(parameter, roles, label)
        if kind is None:
            unknown += [factor.name for factor in roles.values()]
            continue
        has_scale = kind in PRODUCTS
        used = (*PARTS[kind], *((Role.ALPHA, Role.DORA) if has_scale else ()))
        unknown += [factor.name for role, factor in roles.items() if role not in used]
        patches[parameter] = build_patch(
            kind,
            {role: roles[role] for role in used if role in roles},
            label=label,
            alpha=alpha,
            read_scalar=read_scalar,
        )
    for bias in scaled:
        weight = patches.get(f"{bias.removesuffix('bias')}weight")
        if weight is not None:
            patches[bias] = replace(patches[bias], scale=weight.scale)
    if not patches:
        raise ModelFileError(
            f"{label} changes nothing in this model: none of its {len(entries)} keys is known"
            f"{f', the first is {shown(unknown[0])}' if unknown else ''}; choose a LoRA for this model"
        )
    _require_model(patches, shape, label)
    fitting, misfits = _fitted(patches, expected, label)
    unknown += [factor.name for patch in misfits for factor in patch.factors.values()]
    order = {key: index for index, key in enumerate(entries)}
    return LoraFile(
        label=label,
        patches=fitting,
        unknown=tuple(sorted(unknown, key=order.__getitem__)),
        parameters=len(expected),
    )


def _find_factors(
    entries: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    label: str,
    half: str,
) -> tuple[dict[str, dict[Role, Factor]], set[str], list[str]]:
    """By parameter what stands for its change; biases whose change is scaled as their weight's is; keys not known."""
    found: dict[str, dict[Role, Factor]] = {}
    scaled: set[str] = set()
    unknown: list[str] = []
    own = half or FIRST_EXPERT
    has_own = any(_half_of(key)[0] == own for key in entries)  # else it suits either expert
    for key, entry in entries.items():
        key_half, rest = _half_of(key)
        is_others = has_own and key_half not in ("", own)
        if is_others and half:
            continue
        part = None if is_others else read_key(rest)
        if part is None or (
            part.parameter not in expected and not _is_beyond(part.parameter, expected)
        ):
            unknown.append(key)
            continue
        if isinstance(part.role, str):
            raise ModelFileError(
                f"{label}: {shown(key)} belongs to {part.role}, which this version does not merge; use a LoRA, LoHa "
                "or LoKr"
            )
        role = part.role
        is_number = role is Role.ALPHA and entry.dtype != COMPLEX
        if entry.dtype not in MATRIX_TYPES and not is_number:
            raise ModelFileError(
                f"{label} stores {shown(key)} as {entry.dtype}; this version merges {', '.join(MATRIX_TYPES)}, so "
                "choose a 16- or 32-bit file"
            )
        if role is Role.UP_BIAS:
            role = Role.DIFFERENCE
            scaled.add(part.parameter)
        roles = found.setdefault(part.parameter, {})
        if role in roles:
            raise ModelFileError(
                f"{label} has {shown(key)} and {shown(roles[role].name)}, which mean the same; it is damaged "
                "or holds several LoRAs, so choose another file"
            )
        roles[role] = Factor(name=key, entry=entry)
    return found, scaled, unknown


def _half_of(key: str) -> tuple[str, str]:
    """Of HALVES the one that a key belongs to, or nothing, and the key without what says so."""
    begin = next((begin for begin in HALF_OF if key.startswith(begin)), "")
    return HALF_OF.get(begin, ""), key.removeprefix(begin)


def changed_shape(shape: WanShape, names: Collection[str]) -> WanShape:
    """The shape of a model whose parameters `names` are changed: what of them was packed is packed anew, as Q8_0.

    Finer than fp8 and, but for Q8_0 itself, than all blocks that files have. It takes 8.5 bits a value; a matrix whose
    rows are no whole blocks is not packed any more.
    """
    again = PACKINGS["Q8_0"]
    columns = {name: size[-1] for name, size in expected_parameters(shape).items()}
    packed = (
        (name, again if name in names else packing)
        for name, packing in shape.packed
        if name not in names or columns[name] % again.items == 0
    )
    return replace(shape, packed=tuple(packed))


def read_scalar(entry: TensorEntry) -> float:
    """The value of a tensor with one element, which is not complex. Raises ModelFileError."""
    dtype = getattr(torch, BY_CODE[entry.dtype].name)
    return float(torch.frombuffer(bytearray(read_bytes(entry)), dtype=dtype).item())


def _is_beyond(parameter: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether it would be a parameter of this model if it had more blocks."""
    block = block_of(parameter)
    return block is not None and parameter.replace(f"blocks.{block}.", "blocks.0.", 1) in expected


def _kind_of(parameter: str, roles: Mapping[Role, Factor], label: str) -> Kind | None:
    kinds = [kind for kind, parts in PARTS.items() if any(role in roles for role in parts)]
    if len(kinds) > 1:
        raise ModelFileError(
            f"{label} changes {parameter} in several ways ({', '.join(kind.value for kind in kinds)}); it is damaged "
            "or holds several LoRAs, so choose another file"
        )
    return kinds[0] if kinds else None


def _require_model(patches: Mapping[str, Patch], shape: WanShape, label: str) -> None:
    # The output of every attention projection has the model's width.
    widths = [extent(patch)[0] for name, patch in patches.items() if ATTENTION.search(name)]
    if widths and shape.dim not in widths:
        raise ModelFileError(
            f"{label} is made for a model of width {widths[0]}, but this one has width {shape.dim}; choose a LoRA for "
            "this model"
        )
    blocks = {block for parameter in patches if (block := block_of(parameter)) is not None}
    if blocks and max(blocks) >= shape.num_layers:
        # Its blocks are not this model's: merging those that have a counterpart would mean nothing.
        raise ModelFileError(
            f"{label} changes block {max(blocks)}, but the blocks of this model are 0 to {shape.num_layers - 1}; "
            "choose a LoRA for this model"
        )


def _fitted(
    patches: Mapping[str, Patch], expected: Mapping[str, tuple[int, ...]], label: str
) -> tuple[dict[str, Patch], list[Patch]]:
    """What suits its parameter, and what is left out because it has another size. Raises ModelFileError."""
    misfits = {
        name: misfit
        for name, patch in patches.items()
        if (misfit := _misfit(patch, expected[name]))
    }
    if len(misfits) == len(patches):
        name, misfit = next(iter(misfits.items()))
        raise ModelFileError(f"{label} changes {name} {misfit}; choose a LoRA for this model")
    for name, misfit in misfits.items():
        if patches[name].kind is Kind.VALUE:
            # ComfyUI repeats it to the parameter's size, or ends.
            raise ModelFileError(
                f"{label} replaces {name} {misfit}; the file is damaged, or choose a LoRA for this model"
            )
    fitting = {name: patch for name, patch in patches.items() if name not in misfits}
    for name, patch in fitting.items():
        if patch.kind in PRODUCTS and extent(patch)[0] != expected[name][0]:
            fitting[name] = replace(patch, is_reshaped=True)
    return fitting, [patches[name] for name in misfits]


def _misfit(patch: Patch, want: tuple[int, ...]) -> str:
    """Why it does not suit a parameter of shape `want`, or nothing. Of products the number of values must suit."""
    if patch.kind not in PRODUCTS:
        (factor,) = patch.factors.values()
        got = factor.entry.shape
        return "" if got == want else f"by {list(got)}, but this model has it in {list(want)}"
    got, needed = extent(patch), (want[0], prod(want[1:]))
    if patch.kind is Kind.LOHA:
        second = (patch.factors[Role.HADA_W2_A].rows, patch.factors[Role.HADA_W2_B].columns)
        if second != got:
            return f"by {list(second)}, but this model has it in {list(needed)}"
    if prod(got) != prod(needed):
        return f"by {list(got)}, but this model has it in {list(needed)}"
    if patch.dora is not None:
        lengths = patch.factors[Role.DORA].entry.shape
        # ComfyUI has as many dims as the parameter, unless one number is for all of it.
        rows = (want[0], *(1 for _ in want[1:]))
        columns = (1, *want[1:2], *(1 for _ in want[2:]))
        is_one = want[0] == prod(lengths) == 1 and len(lengths) <= len(want)
        if got != needed or (lengths not in (rows, columns) and not is_one):
            return f"by DoRA to lengths {list(lengths)}, but this model has it in {list(want)}"
    return ""
