"""What nodes have put on a MODEL, as LoRA files that ranks can merge; what cannot be carried is refused by name.

ComfyUI keeps for each parameter the changes that its LoRA loaders asked for, in order, each with a strength.
Source: ComfyUI 0.3.75, comfy/lora.py and comfy/weight_adapter/. Behaviour only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ipc.errors import ConfigError
from ..model_file.names import listed

PREFIX = "diffusion_model."
# What each place in an adapter's weights is called in a file; of those without a name there must be none.
PARTS: Mapping[str, Sequence[str | None]] = {
    "lora": ("lora_up.weight", "lora_down.weight", "alpha", None, "dora_scale", None),
    "loha": (
        *("hada_w1_a", "hada_w1_b", "alpha", "hada_w2_a", "hada_w2_b", None, None),
        "dora_scale",
    ),
    "lokr": (
        *("lokr_w1", "lokr_w2", "alpha", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", None),
        "dora_scale",
    ),
}
ENDS = {"diff": "diff", "set": "set_weight"}


@dataclass(frozen=True, kw_only=True)
class PatchFile:
    """The content of a LoRA file: tensors by key, and how strongly they are to be merged."""

    tensors: Mapping[str, Tensor]
    strength: float


@dataclass(frozen=True, kw_only=True)
class CarriedPatches:
    """What a MODEL's weights are changed by: files to be merged in this order. Of one key are always the same."""

    key: object
    files: tuple[PatchFile, ...]


def read_patches(patcher: Any) -> CarriedPatches:
    """A ModelPatcher's changes of weights. Raises ConfigError."""
    return CarriedPatches(key=patcher.patches_uuid, files=patch_files(patcher.patches))


def patch_files(patches: Mapping[str, Sequence[Any]]) -> tuple[PatchFile, ...]:
    """By parameter its changes, as files of which each has one strength and one change of a parameter at most.

    Raises ConfigError.
    """
    files: dict[tuple[int, float], dict[str, Tensor]] = {}
    refused: dict[str, str] = {}
    for key, changes in patches.items():
        parameter = key.removeprefix(PREFIX)
        for number, change in enumerate(changes):
            strength, value, *others = change
            if strength == 0:
                continue
            try:
                if others not in ([1.0, None, None], [1, None, None]):
                    raise ValueError("a merge of models, or a change of a part")
                named = dict(_tensors_of(value))
            except ValueError as error:
                refused[key] = str(error)
                continue
            file = files.setdefault((number, float(strength)), {})
            file.update({f"{parameter}.{end}": tensor for end, tensor in named.items()})
    if refused:
        kinds = ", ".join(dict.fromkeys(refused.values()))
        raise ConfigError(
            f"the MODEL of Wan Dist carries {kinds} for {listed(list(refused))}, which its ranks do not merge; use "
            "LoRA, LoHa, LoKr and differences, or load the model with a stock loader"
        )
    return tuple(
        PatchFile(tensors=tensors, strength=strength)
        for (_, strength), tensors in sorted(files.items(), key=lambda item: item[0][0])
    )


def _tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """What stands for a change in a file. Raises ValueError that names its kind if ranks do not know it."""
    if isinstance(value, tuple):
        kind, parts = value if len(value) == 2 else ("diff", value)
        if kind not in ENDS or not isinstance(parts[0], Tensor) or any(parts[1:]):
            raise ValueError(f"a change of kind {kind}")
        yield ENDS[kind], parts[0]
        return
    kind = getattr(value, "name", type(value).__name__)
    ends = PARTS.get(kind, ())
    if len(ends) != len(getattr(value, "weights", ())):
        raise ValueError(f"a change of kind {kind}")
    for end, part in zip(ends, value.weights, strict=True):
        if part is None:
            continue
        if end is None:
            raise ValueError(f"a Tucker decomposition or a change of shape in a {kind}")
        yield end, part if isinstance(part, Tensor) else torch.tensor(float(part))
