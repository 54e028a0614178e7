"""Which files hold the model that a path means: one file, all its parts, all shards of an index, or those of a folder.

A folder is an official one, a component of diffusers, or a whole pipeline of diffusers, of which one component is
meant. Only .safetensors and .gguf files are; pickles are never opened.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

from ..ipc.errors import ModelFileError
from .names import listed, shown

SUFFIXES = (".safetensors", ".sft")
GGUF_SUFFIX = ".gguf"
PICKLE_SUFFIXES = (".pth", ".pt", ".ckpt", ".bin", ".pkl")
SHARD_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors")
INDEX_SUFFIX = ".safetensors.index.json"
VARIANT_INDEX = re.compile(r".+\.safetensors\.index\.[^.]+\.json")
"""Of a variant of diffusers, such as fp16."""
GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MEMORY_FILE = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
"""A safetensors file of memory_file.py."""
PIPELINE_NAME = "model_index.json"
MAX_INDEX_BYTES = 2**24
COMPONENT_FILE = "diffusion_pytorch_model.safetensors"

NO_PICKLES = "pickled checkpoints can run code when opened and are never loaded, so convert it to safetensors"


def files_of(path: Path, *, component: str) -> tuple[Path, list[Path]]:
    """The files of the model at `path`, which is one of them or a folder, and before them the file that stands for all.

    That one leads to the same files again: the first, or an index whose shards do not tell its name.
    component: of a pipeline the subfolder. Raises ModelFileError.
    """
    if is_folder(path):
        path = _model_in(path, component)
    if path.name.endswith(INDEX_SUFFIX) or VARIANT_INDEX.fullmatch(path.name):
        shards = _shards_of(path)
        leads_to = index_of(shards[0])
        is_alone = leads_to is None and len(shards) == 1
        return shards[0] if is_alone or leads_to == path else path, shards
    if has_suffix(path.name, GGUF_SUFFIX):
        parts = _parts_of(path)
        return parts[0], parts
    if MEMORY_FILE.fullmatch(str(path)):
        return path, [path]
    if not has_suffix(path.name, SUFFIXES):
        raise ModelFileError(f"{path.name} is not a .safetensors or .gguf file; {NO_PICKLES}")
    index = index_of(path)
    shards = [path] if index is None else _shards_of(index, shard=path)
    return shards[0], shards


def has_suffix(name: str, suffixes: str | tuple[str, ...]) -> bool:
    """Whether a file is of a kind by its name, in capitals or not, as ComfyUI asks."""
    return name.lower().endswith(suffixes)


def is_folder(path: Path) -> bool:
    """Raises ModelFileError for a path that leads in a circle; what is not there is no folder."""
    try:
        return Path(os.path.realpath(path, strict=True)).is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ModelFileError(f"{path.name} cannot be read: {error.strerror}") from error
        return False


def index_of(path: Path) -> Path | None:
    """Where the index of a shard lies, or None for a file that is no shard by its name."""
    match = SHARD_NAME.fullmatch(path.name)
    if match is None:
        return None
    stem, _, variant = match["stem"].rpartition(".")
    of_variant = path.with_name(f"{stem}.safetensors.index.{variant}.json")
    return (
        of_variant if os.path.isfile(of_variant) else path.with_name(match["stem"] + INDEX_SUFFIX)
    )


def is_later_part(name: str) -> bool:
    """Whether a file of this name is a part of a GGUF model, and not its first."""
    match = GGUF_PART.fullmatch(name)
    return match is not None and int(match["number"]) > 1


def _parts_of(path: Path) -> list[Path]:
    """All parts of a GGUF model, as llama-gguf-split names them."""
    match = GGUF_PART.fullmatch(path.name)
    if match is None or not 0 < int(match["number"]) <= int(match["count"]):
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{n + 1:05}-of-{count:05}.gguf" for n in range(count)]
    if missing := [name for name in names if not os.path.isfile(path.with_name(name))]:
        raise ModelFileError(
            f"{path.name} is one part of {count}, but {missing[0]} is not there; put all parts in one folder"
        )
    return [path.with_name(name) for name in names]


def _model_in(folder: Path, component: str) -> Path:
    """The file or index that stands for the model in `folder`."""
    if os.path.isfile(folder / PIPELINE_NAME):
        folder = folder / component
        if not is_folder(folder):
            raise ModelFileError(
                f"{folder.parent.name} is a folder of diffusers without {component}/; download it again"
            )
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ModelFileError(f"{folder.name} cannot be read: {error.strerror or error}") from error
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    variants = [name for name in names if VARIANT_INDEX.fullmatch(name)]
    whole = [name for name in names if has_suffix(name, SUFFIXES)]
    if indices:
        found = indices
    elif COMPONENT_FILE in whole:
        found = [COMPONENT_FILE]
    elif variants:
        found = variants
    elif len({index_of(folder / name) for name in whole} - {None}) == 1:
        found = whole[:1]  # its missing index will be named
    else:
        found = whole
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise ModelFileError(f"{folder.name} holds {listed(found)}; choose one of them")
    if pickled := [name for name in names if has_suffix(name, PICKLE_SUFFIXES)]:
        raise ModelFileError(f"{folder.name} holds only {listed(pickled)}; {NO_PICKLES}")
    raise ModelFileError(f"{folder.name} holds no .safetensors file; choose another folder")


def _shards_of(index: Path, *, shard: Path | None = None) -> list[Path]:
    """All files that `index` names; with `shard`, it was looked for because of that one."""
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = (
            f"the index {index.name}"
            if shard is None
            else f"{shard.name} is one shard of several, but its index {index.name}"
        )
        raise ModelFileError(
            f"{what} cannot be read ({error}); put all shards and the index in one folder"
        ) from error
    if pickled := [name for name in names if has_suffix(str(name), PICKLE_SUFFIXES)]:
        raise ModelFileError(f"{index.name} names {shown(pickled[0])}; {NO_PICKLES}")
    if not names or not all(_is_plain(name) for name in names):
        raise ModelFileError(
            f"{index.name} names shards that are no model files of its own folder; download the index again"
        )
    # os.path.isfile: no name makes it raise.
    missing = [name for name in names if not os.path.isfile(index.with_name(name))]
    if missing:
        is_link = os.path.islink(index.with_name(missing[0]))
        what = "a link that leads nowhere" if is_link else "not there"
        raise ModelFileError(
            f"{index.name} names the shard {shown(missing[0])}, which is {what}; put all shards in one folder"
        )
    if shard is not None and shard.name not in names:
        raise ModelFileError(
            f"{shard.name} is none of the shards that {index.name} names; choose one of those"
        )
    return [index.with_name(name) for name in names]


def _is_plain(name: object) -> bool:
    """Whether it is a model file's name and leads nowhere."""
    return isinstance(name, str) and Path(name).name == name and has_suffix(name, SUFFIXES)
