"""What a prompt brings, checked against the model and the latent that it is for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.mesh.shape import ConditionKind, WanShape


def validate_text(context: Tensor, *, text_dim: int, batch: int, label: str) -> None:
    """Refuse a prompt embedding that does not fit the model or the batch."""
    if context.dim() != 3 or context.shape[-1] != text_dim or context.shape[0] not in (1, batch):
        raise ConfigError(
            f"the {label} conditioning has shape {list(context.shape)}; this model needs [1, tokens, {text_dim}]: "
            "encode the prompt with the umT5 text encoder of Wan (CLIPLoader type wan)"
        )


def validate_conditions(
    conditions: Mapping[str, Tensor], shape: WanShape, latent: Tensor, *, label: str
) -> None:
    """Refuse conditions that a model of `shape` does not take, lacks, or that do not fit the latent [B, C, T, h, w]."""
    taken = {kind.name: kind for kind in shape.conditions}
    for name in {**taken, **conditions}:
        kind = taken.get(name) or ConditionKind(name=name, channels=0)
        given = conditions.get(name)
        if given is None and kind.channels == 0:
            continue
        if given is None or not _fits(given, kind, latent):
            got = "none" if given is None else f"shape {list(given.shape)}"
            raise ConfigError(
                f"the {label} {name} conditioning is {got}, this model and latent need {_needed(kind, latent)}; "
                f"{kind.remedy}"
            )


def _fits(given: Tensor, kind: ConditionKind, latent: Tensor) -> bool:
    if kind.channels == 0 or given.shape[0] not in (1, latent.shape[0]):
        return False
    if kind.on_tokens:
        return given.shape[1:] == (kind.channels, *latent.shape[2:])
    return given.dim() == 3 and given.shape[2] == kind.channels


def _needed(kind: ConditionKind, latent: Tensor) -> str:
    if kind.channels == 0:
        return "none"
    batch = f"1 or {latent.shape[0]}"
    if kind.on_tokens:
        return f"[{batch}, {kind.channels}, {', '.join(map(str, latent.shape[2:]))}]"
    return f"[{batch}, tokens, {kind.channels}]"
