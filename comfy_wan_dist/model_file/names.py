"""How a file names the parameters of a Wan transformer, and what their official names are.

Told from the names alone: official or diffusers, bare or behind a prefix. What is mapped is the module, so tensors
that accompany a weight, such as `X.weight_scale`, go with it.
Source: key tables of the official Wan2.2 checkpoint and of diffusers' WanTransformer3DModel. Beware of the norms, which
diffusers numbers in order of execution: its norm2 is the official norm3.
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..ipc.errors import ModelFileError

T = TypeVar("T")

PREFIXES = ("", "model.diffusion_model.", "model.model.", "net.", "model.", "diffusion_model.")
"""The last is not known to ComfyUI, so of two models in a file it takes the other."""

# ComfyUI asks for more than five tensors behind a prefix, too.
FEWEST_NAMES = 6

# Parameters without a module of their own are paths like any other.
DIFFUSERS_PATHS = {
    "patch_embedding": "patch_embedding",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}
DIFFUSERS_BLOCK_PATHS = {
    "scale_shift_table": "modulation",
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img",
} | {
    f"{theirs}.{projection}": f"{ours}.{official}"
    for theirs, ours in (("attn1", "self_attn"), ("attn2", "cross_attn"))
    for projection, official in (
        ("to_q", "q"),
        ("to_k", "k"),
        ("to_v", "v"),
        ("to_out.0", "o"),
        ("norm_q", "norm_q"),
        ("norm_k", "norm_k"),
    )
}
BLOCK = re.compile(r"(blocks\.[0-9]+)\.(.+)")

OFFICIAL_PATHS = frozenset(DIFFUSERS_PATHS.values())
OFFICIAL_BLOCK_PATHS = frozenset(DIFFUSERS_BLOCK_PATHS.values())


def official_path(path: str) -> str | None:
    """The official path of a module, or of a parameter without one, that diffusers calls `path`. None if unknown."""
    if block := BLOCK.fullmatch(path):
        official = DIFFUSERS_BLOCK_PATHS.get(block[2])
        return None if official is None else f"{block[1]}.{official}"
    return DIFFUSERS_PATHS.get(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """How a file names the parameters. Of several models in one file the transformer is what `prefix` begins."""

    prefix: str
    is_diffusers: bool

    def official(self, name: str) -> str | None:
        """The official name of a tensor or module; one that is not known stays. None for what is beside the prefix."""
        if not name.startswith(self.prefix):
            return None
        bare = name[len(self.prefix) :]
        if not self.is_diffusers:
            return bare
        if (path := official_path(bare)) is not None:
            return path
        module, dot, leaf = bare.rpartition(".")
        path = official_path(module)
        return bare if path is None else path + dot + leaf

    def knows(self, name: str) -> bool:
        """Whether a parameter of the transformer has that name."""
        if not name.startswith(self.prefix):
            return False
        bare = name[len(self.prefix) :]
        module, _, leaf = bare.rpartition(".")
        path = module if leaf in ("weight", "bias") else bare
        if self.is_diffusers:
            return official_path(path) is not None
        if block := BLOCK.fullmatch(path):
            return block[2] in OFFICIAL_BLOCK_PATHS
        return path in OFFICIAL_PATHS


def find_naming(names: Iterable[str]) -> Naming | None:
    """The naming by which most of `names` are parameters of a Wan transformer, or None if few are by any."""
    namings = [
        Naming(prefix=prefix, is_diffusers=is_diffusers)
        for prefix in PREFIXES
        for is_diffusers in (False, True)
    ]
    found = Counter(naming for name in names for naming in namings if naming.knows(name))
    best = max(namings, key=lambda naming: found[naming])
    return best if found[best] >= FEWEST_NAMES else None


def official_tensors(tensors: Mapping[str, T], naming: Naming, *, label: str) -> dict[str, T]:
    """The transformer's tensors under their official names. Raises ModelFileError if two have the same."""
    renamed: dict[str, T] = {}
    for name, tensor in tensors.items():
        official = naming.official(name)
        if official is None:
            continue
        if official in renamed:
            raise ModelFileError(
                f"{label} holds the tensor {shown(official)} under two names, one of them {shown(name)}; "
                "download it again"
            )
        renamed[official] = tensor
    return renamed


def describe(names: Collection[str]) -> str:
    """What a file with these names looks like, as a clause."""
    if find_naming(names) is not None:
        return "it is a Wan transformer"
    if any(name.startswith(("decoder.", "encoder.conv", "first_stage_model.")) for name in names):
        return "it looks like a VAE"
    if any("SelfAttention" in name or "self_attn.q_proj" in name for name in names):
        return "it looks like a text encoder"
    if any("lora" in name for name in names):
        return "it looks like a LoRA"
    return f"its {len(names)} tensors have other names"


# ---- in messages


def shown(value: object) -> str:
    """A name or value out of a file as Python writes it, on one line, cut in the middle where it is long."""
    brief = reprlib.Repr()
    brief.maxstring, brief.maxlist, brief.maxlevel = 100, 16, 2
    return brief.repr(value)


def listed(names: Sequence[str], *, most: int = 3) -> str:
    """The first few of `names`, and how many more there are."""
    more = len(names) - most
    return ", ".join(map(shown, names[:most])) + (f" and {more} more" if more > 0 else "")
