"""What the tensors of a LoRA file are called: which of the model's parameters each belongs to, and as what.

Paths: official or diffusers' names, dotted behind any known prefix, or with underscores behind `lora_unet_` and the
like. Ends: those of PEFT, diffusers, kohya, LyCORIS and ComfyUI.
Source: the keys that ComfyUI, diffusers, PEFT, musubi-tuner and LyCORIS read and write.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from .names import DIFFUSERS_BLOCK_PATHS, DIFFUSERS_PATHS, OFFICIAL_BLOCK_PATHS, OFFICIAL_PATHS


class Role(enum.Enum):
    """What a tensor is in the change of a parameter."""

    DOWN = "down"
    UP = "up"
    HADA_W1_A = "hada_w1_a"
    HADA_W1_B = "hada_w1_b"
    HADA_W2_A = "hada_w2_a"
    HADA_W2_B = "hada_w2_b"
    LOKR_W1 = "lokr_w1"
    LOKR_W1_A = "lokr_w1_a"
    LOKR_W1_B = "lokr_w1_b"
    LOKR_W2 = "lokr_w2"
    LOKR_W2_A = "lokr_w2_a"
    LOKR_W2_B = "lokr_w2_b"
    UP_BIAS = "up's bias"
    DIFFERENCE = "difference"
    VALUE = "value"
    ALPHA = "alpha"
    DORA = "dora_scale"


_LYCORIS = "hada_w[12]_[ab]|lokr_w[12](?:_[ab])?"
_ADAPTER = r"(?:\.[^.]+)?"  # PEFT's name of it
ENDS: tuple[tuple[re.Pattern[str], Role], ...] = tuple(
    (re.compile(rf"(?:{end})\Z"), role)
    for end, role in (
        (rf"\.lora_down\.weight|\.lora_A{_ADAPTER}\.weight|\.lora_A", Role.DOWN),
        (rf"\.lora_up\.weight|\.lora_B{_ADAPTER}\.weight|\.lora_B", Role.UP),
        (r"[._]lora\.down\.weight|\.lora_linear_layer\.down\.weight", Role.DOWN),
        (r"[._]lora\.up\.weight|\.lora_linear_layer\.up\.weight", Role.UP),
        (r"\.alpha", Role.ALPHA),
        (r"\.dora_scale", Role.DORA),
        (r"\.diff|\.w_norm", Role.DIFFERENCE),
        (r"\.set_weight", Role.VALUE),
        *(
            (rf"\.{role.value}", role)
            for role in Role
            if re.fullmatch(_LYCORIS, role.value) is not None
        ),
    )
)
BIAS_ENDS: tuple[tuple[re.Pattern[str], Role], ...] = (
    (re.compile(r"(?:\.diff_b|\.b_norm)\Z"), Role.DIFFERENCE),
    (re.compile(rf"\.lora_B{_ADAPTER}\.bias\Z"), Role.UP_BIAS),
)
"""What changes the bias of the module that the key names. PEFT scales an up's bias as it scales the up."""
UNSUPPORTED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"(?:{end})\Z"), kind)
    for end, kind in (
        (rf"\.lora_magnitude_vector{_ADAPTER}(?:\.weight)?", "PEFT's form of DoRA"),
        (r"\.lora_mid\.weight|\.hada_t[12]|\.lokr_t2", "a Tucker decomposition"),
        (r"\.oft_blocks|\.oft_diag", "OFT or BOFT"),
        (r"\.[ab][12]\.weight", "GLoRA"),
        (r"\.reshape_weight", "a change of shape"),
    )
)
"""Changes that are known and not made."""

PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "pipe.",
    "dit.",
    "model.",
    "net.",
)
UNDERSCORED = re.compile(r"(?:lora_unet__?|lora_transformer_|lycoris_)(?=[a-z])")
"""Prefixes after which dots are underscores."""

_DOTTED_BLOCK = re.compile(r"blocks\.([0-9]{1,4})\.(.+)")
_UNDERSCORED_BLOCK = re.compile(r"blocks_([0-9]{1,4})_(.+)")
_PATHS = {path: path for path in OFFICIAL_PATHS} | DIFFUSERS_PATHS
_BLOCK_PATHS = {path: path for path in OFFICIAL_BLOCK_PATHS} | DIFFUSERS_BLOCK_PATHS
_UNDERSCORED_PATHS = {path.replace(".", "_"): official for path, official in _PATHS.items()}
_UNDERSCORED_BLOCK_PATHS = {
    path.replace(".", "_"): official for path, official in _BLOCK_PATHS.items()
} | {
    # ai-toolkit's older LoKr: diffusers' path, of which only the attention became official.
    f"{attention}_to_out_0": f"{attention}.o"
    for attention in ("self_attn", "cross_attn")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A tensor's place: the official name of the parameter, and the tensor's role in its change.

    role: what is not supported, in words, if it is a known kind that is not.
    """

    parameter: str
    role: Role | str


def read_key(key: str) -> Part | None:
    """The place of the tensor `key`, or None if it is not known. The parameter may be one that the model has not."""
    if key.endswith(".diff_m"):  # LightX2V's name for the modulation of a block, or of the head
        key = f"{key.removesuffix('.diff_m')}.modulation.diff"
    for pattern, bias_role in BIAS_ENDS:
        if end := pattern.search(key):
            path = _official(key[: end.start()])
            return None if path is None else Part(parameter=f"{path}.bias", role=bias_role)
    for ends in (ENDS, UNSUPPORTED):
        for pattern, role in ends:
            if end := pattern.search(key):
                parameter = _parameter(key[: end.start()])
                return None if parameter is None else Part(parameter=parameter, role=role)
    return None


def block_of(parameter: str) -> int | None:
    """The number of the block that an official name belongs to."""
    found = _DOTTED_BLOCK.fullmatch(parameter)
    return None if found is None else int(found[1])


def _parameter(path: str) -> str | None:
    """What a change of `path` changes: a module's weight, unless it names a parameter."""
    module, dot, leaf = path.rpartition(".")
    if leaf in ("weight", "bias"):
        official = _official(module)
        return None if official is None else official + dot + leaf
    official = _official(path)
    if official is None or official.endswith("modulation"):
        return official
    return f"{official}.weight"


def _official(path: str) -> str | None:
    if prefix := UNDERSCORED.match(path):
        path = path[prefix.end() :]
        block = _UNDERSCORED_BLOCK.fullmatch(path)
        paths = _UNDERSCORED_PATHS if block is None else _UNDERSCORED_BLOCK_PATHS
    else:
        while prefixed := next((p for p in PREFIXES if path.startswith(p)), None):
            path = path[len(prefixed) :]
        block = _DOTTED_BLOCK.fullmatch(path)
        paths = _PATHS if block is None else _BLOCK_PATHS
    if block is None:
        return paths.get(path)
    inside = paths.get(block[2])
    return None if inside is None else f"blocks.{int(block[1])}.{inside}"
