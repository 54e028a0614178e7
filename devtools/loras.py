"""Write seeded LoRA files in every spelling, and merge them by formulas of their own in float64.

A LoRA is given as `Parts`: for each official name of a parameter the tensors of its change, under the ends of
LyCORIS' keys. Names on the left of `TRANSFORMER_NAMES` are the official ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .references import TRANSFORMER_NAMES, renamed

Parts = Mapping[str, Mapping[str, Tensor]]

RANK = 4
ENDS = {
    "up": "lora_up.weight",
    "down": "lora_down.weight",
    "bias": "diff_b",
}
PEFT_ENDS = {"up": "lora_B.weight", "down": "lora_A.weight"}
ADAPTER_ENDS = {"up": "lora_B.default.weight", "down": "lora_A.default.weight"}


def diffusers_path(path: str) -> str:
    """The name in diffusers of a module, or of a parameter without one."""
    return (
        renamed(f"{path}.", TRANSFORMER_NAMES).removesuffix(".")
        if "modulation" not in path
        else (renamed(path, TRANSFORMER_NAMES))
    )


# How a key begins for a module's official path, and what ends differ.
SPELLINGS: dict[str, tuple[Callable[[str], str], Mapping[str, str]]] = {
    "comfyui": (lambda path: f"diffusion_model.{path}", ENDS),
    "comfyui, A and B": (lambda path: f"diffusion_model.{path}", ENDS | PEFT_ENDS),
    "kohya": (lambda path: f"lora_unet_{path.replace('.', '_')}", ENDS),
    "wan-fun": (lambda path: f"lora_unet__{path.replace('.', '_')}", ENDS),
    "diffusers": (lambda path: f"transformer.{diffusers_path(path)}", ENDS | PEFT_ENDS),
    "diffusers, one expert": (
        lambda path: f"transformer_2.{diffusers_path(path)}",
        ENDS | PEFT_ENDS,
    ),
    "peft": (lambda path: f"base_model.model.{path}", ENDS | ADAPTER_ENDS),
    "peft, diffusers": (
        lambda path: f"base_model.model.{diffusers_path(path)}",
        ENDS | ADAPTER_ENDS,
    ),
    "bare": (lambda path: path, ENDS | PEFT_ENDS),
}


def spelled(parts: Parts, spelling: str) -> dict[str, Tensor]:
    """The tensors of a LoRA file."""
    begin, ends = SPELLINGS[spelling]
    return {
        f"{begin(name.removesuffix('.weight'))}.{ends.get(end, end)}": tensor.contiguous()
        for name, tensors in parts.items()
        for end, tensor in tensors.items()
    }


class PartsMaker:
    """Seeded changes, each about as large as `size` times the weights that they change."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, seed: int, size: float = 0.3
    ) -> None:
        self._shapes = shapes
        self._generator = torch.Generator().manual_seed(seed)
        self._size = size

    def low_rank(self, name: str, *, alpha: float | None = 2.0) -> dict[str, Tensor]:
        rows, *others = self._shapes[name]
        columns = torch.Size(others).numel()
        up, down = self._noise(rows, RANK), self._noise(RANK, *others)
        scale = 1 if alpha is None else RANK / alpha
        parts = {
            "up": up.view(rows, RANK, *(1 for _ in others[1:])),
            "down": down * scale * self._size,
        }
        parts["down"] /= (RANK * columns) ** 0.5
        return parts if alpha is None else parts | {"alpha": torch.tensor(alpha)}

    def reshaped(self, name: str) -> dict[str, Tensor]:
        """A pair of twice the rows, and half the columns."""
        rows, columns = self._shapes[name]
        size = self._size / (RANK * columns) ** 0.5
        return {"up": self._noise(rows * 2, RANK), "down": self._noise(RANK, columns // 2) * size}

    def dora(self, name: str, *, by_rows: bool) -> dict[str, Tensor]:
        rows, columns = self._shapes[name]
        lengths = (rows, 1) if by_rows else (1, columns)
        return self.low_rank(name) | {"dora_scale": 1 + 0.3 * self._noise(*lengths)}

    def hadamard(self, name: str) -> dict[str, Tensor]:
        rows, columns = self._shapes[name]
        size = (self._size / columns**0.5) ** 0.5 / RANK**0.5
        return {
            "hada_w1_a": self._noise(rows, RANK),
            "hada_w1_b": self._noise(RANK, columns) * size,
            "hada_w2_a": self._noise(rows, RANK),
            "hada_w2_b": self._noise(RANK, columns) * size,
            "alpha": torch.tensor([3.0]),
        }

    def kronecker(self, name: str, *, factored: bool) -> dict[str, Tensor]:
        rows, columns = self._shapes[name]
        small = self._noise(8, 4) * self._size / columns**0.5
        height, width = rows // 8, columns // 4
        if not factored:
            return {
                "lokr_w1": small,
                "lokr_w2": self._noise(height, width),
                "alpha": torch.tensor(9.0),
            }
        return {
            "lokr_w1": small,
            "lokr_w2_a": self._noise(height, RANK),
            "lokr_w2_b": self._noise(RANK, width),
            "alpha": torch.tensor(1.0),
        }

    def difference(self, name: str) -> dict[str, Tensor]:
        shape = self._shapes[name]
        return {"diff": self._noise(*shape) * self._size / shape[-1] ** 0.5}

    def bias(self, name: str) -> dict[str, Tensor]:
        """For the weight `name`: a difference of its bias."""
        return {"bias": self._noise(self._shapes[name][0]) * self._size * 0.1}

    def value(self, name: str) -> dict[str, Tensor]:
        shape = self._shapes[name]
        return {"set_weight": self._noise(*shape) / shape[-1] ** 0.5}

    def _noise(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator)


def plain_lora(shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> Parts:
    """A pair of factors for every matrix, without biases, as trainers write it."""
    make = PartsMaker(shapes, seed=seed)
    return {
        name: make.low_rank(name)
        for name, shape in shapes.items()
        if len(shape) == 2 and "." in name
    }


def mixed_lora(shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> Parts:
    """Every kind of change, of cut and whole, first and last parameters."""
    make = PartsMaker(shapes, seed=seed)
    changes: dict[str, Mapping[str, Tensor]] = {}
    first, second, third = (f"blocks.{index}" for index in range(3))
    for attention in ("self_attn", "cross_attn"):
        for projection in "qkvo":
            name = f"{first}.{attention}.{projection}.weight"
            changes[name] = make.low_rank(name) | make.bias(name)
    for name in ("patch_embedding", "text_embedding.2", "time_projection.1", "head.head"):
        changes[f"{name}.weight"] = make.low_rank(f"{name}.weight", alpha=None) | make.bias(
            f"{name}.weight"
        )
    for block in (first, second):
        changes[f"{block}.norm3.weight"] = make.difference(f"{block}.norm3.weight") | make.bias(
            f"{block}.norm3.weight"
        )
        changes[f"{block}.self_attn.norm_q.weight"] = make.difference(
            f"{block}.self_attn.norm_q.weight"
        )
        changes[f"{block}.modulation"] = make.difference(f"{block}.modulation")
    changes["head.modulation"] = make.difference("head.modulation")
    for name in ("self_attn.q", "self_attn.o"):
        changes[f"{second}.{name}.weight"] = make.hadamard(f"{second}.{name}.weight")
    changes[f"{second}.ffn.0.weight"] = make.kronecker(f"{second}.ffn.0.weight", factored=True)
    changes[f"{second}.ffn.2.weight"] = make.kronecker(f"{second}.ffn.2.weight", factored=False)
    for name in ("ffn.0", "ffn.2"):
        changes[f"{first}.{name}.weight"] = make.dora(f"{first}.{name}.weight", by_rows=True)
        changes[f"{third}.{name}.weight"] = make.dora(f"{third}.{name}.weight", by_rows=False)
    for name in ("self_attn.k", "self_attn.o"):
        changes[f"{third}.{name}.weight"] = make.reshaped(f"{third}.{name}.weight")
    changes[f"{third}.self_attn.v.weight"] = make.value(f"{third}.self_attn.v.weight")
    changes[f"{third}.cross_attn.o.weight"] = make.difference(f"{third}.cross_attn.o.weight")
    return changes


def merged(weights: Mapping[str, Tensor], *loras: tuple[Parts, float]) -> dict[str, Tensor]:
    """`weights` with the LoRAs merged one after another at their strengths, in the weights' type."""
    values = {name: value.double() for name, value in weights.items()}
    for parts, strength in loras:
        for name, tensors in parts.items():
            given = {end: tensor.double() for end, tensor in tensors.items()}
            if "bias" in given:
                values[f"{name.removesuffix('.weight')}.bias"] += strength * given.pop("bias")
            if given:
                values[name] = _changed(values[name], given, strength)
    return {name: value.to(weights[name].dtype) for name, value in values.items()}


def _changed(weight: Tensor, given: dict[str, Tensor], strength: float) -> Tensor:
    if "set_weight" in given:
        return given["set_weight"]
    if "diff" in given:
        return weight + strength * given["diff"]
    if "up" in given:
        down = given["down"].flatten(1)
        change, rank = given["up"].flatten(1) @ down, len(down)
    elif "hada_w1_a" in given:
        change = (given["hada_w1_a"] @ given["hada_w1_b"]) * (
            given["hada_w2_a"] @ given["hada_w2_b"]
        )
        rank = len(given["hada_w1_b"])
    else:
        is_factored = "lokr_w2_a" in given
        w2 = given["lokr_w2_a"] @ given["lokr_w2_b"] if is_factored else given["lokr_w2"]
        change = torch.kron(given["lokr_w1"], w2)
        rank = len(given["lokr_w2_b"]) if is_factored else 0
    if "alpha" in given and rank:
        change = change * given["alpha"].item() / rank
    change = change.view_as(weight)
    if "dora_scale" not in given:
        return weight + strength * change
    scale: Tensor = given["dora_scale"]
    changed: Any = weight + change
    length = (
        weight.norm(dim=1, keepdim=True)
        if len(scale) == len(weight)
        else changed.norm(dim=0, keepdim=True)
    )
    return weight + strength * (changed * (scale / length) - weight)
