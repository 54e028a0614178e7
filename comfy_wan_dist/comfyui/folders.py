"""ComfyUI's folders: which models, LoRAs and saved prompts there are, and where; where new files go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import folder_paths

from ..group.spec import LOG_FOLDER
from ..ipc.errors import ConfigError, ModelFileError
from ..model_file.files import GGUF_SUFFIX, NO_PICKLES, SUFFIXES, has_suffix, is_later_part
from ..model_file.offered import folder_named, listed_names
from ..model_file.walk import walk_models

FILE_FOLDER_LABELS = ("input", "output")
COMPONENTS = {"diffusion_models": "transformer", "vae": "vae"}
"""What diffusers calls the models in ComfyUI's folders."""


def list_models(folder: str) -> list[str]:
    """Names of the models in a folder of COMPONENTS and in that for diffusers; model_file/offered.py says which."""
    files = _listed_files(folder)
    if folder == "diffusion_models":
        files += gguf_files(folder)
    return listed_names(
        [name for name in dict.fromkeys(files) if has_suffix(name, (*SUFFIXES, GGUF_SUFFIX))],
        folder_paths.get_folder_paths(folder),
        pipeline_roots(folder),
        component=COMPONENTS[folder],
    )


def pipeline_roots(folder: str) -> list[str]:
    """Where folders of diffusers may lie whose part is one of those models; a VAE's beside transformers, too."""
    folders = ("diffusers", "diffusion_models") if folder == "vae" else ("diffusers",)
    return [root for each in folders for root in folder_paths.get_folder_paths(each)]


def list_loras() -> list[str]:
    """Names of the files in the folders of LoRAs."""
    return [name for name in _listed_files("loras") if has_suffix(name, SUFFIXES)]


def _listed_files(folder: str) -> list[str]:
    """Names of the files in the folders of a kind, as ComfyUI lists them."""
    try:
        names = folder_paths.get_filename_list(folder)
    except OSError:  # a folder that it has listed before is gone, whose time it looks at first
        names = folder_paths.get_filename_list_(folder)[0]
    return list(names)


def lora_path(name: str) -> str:
    """Full path of a LoRA. Raises ConfigError when it is gone, ModelFileError for what is never opened."""
    if not has_suffix(name, SUFFIXES):
        raise ModelFileError(f"{name!r} is not a .safetensors file; {NO_PICKLES}")
    return _existing(folder_paths.get_full_path("loras", name), "loras", name)


def gguf_files(folder: str) -> list[str]:
    """Names of the GGUF files in a model folder, which ComfyUI's own lists leave out."""
    roots = folder_paths.get_folder_paths(folder)
    names = {name for root in roots for name in _names_below(root, GGUF_SUFFIX, follow_links=True)}
    return sorted(name for name in names if not is_later_part(name))


def _names_below(root: str, suffix: str, *, follow_links: bool) -> Iterator[str]:
    for folder, _, files in walk_models(root, follow_links=follow_links):
        for name in files:
            if has_suffix(name, suffix):
                yield os.path.relpath(os.path.join(folder, name), root)


def model_path(folder: str, name: str) -> str:
    """Full path of a model, a file or a folder. Raises ConfigError when it is gone."""
    path = folder_named(
        name, folder_paths.get_folder_paths(folder), pipeline_roots(folder)
    ) or folder_paths.get_full_path(folder, name)
    return _existing(path, folder, name)


def _existing(path: str | None, folder: str, name: str) -> str:
    if path is None:
        raise ConfigError(
            f"{name!r} is not in the {folder} folders of ComfyUI; refresh the list and choose again"
        )
    return path


def validate_model_name(folder: str, name: str | None) -> str | bool:
    """For a node's `validate_inputs`, which thereby takes names that are good but not listed. None: it is linked."""
    try:
        if name is not None:
            model_path(folder, name)
    except ConfigError as error:
        return str(error)
    return True


def list_conditioning() -> list[str]:
    """Names of .safetensors files in the input and output folders, each ending in its folder's label."""
    names = []
    for label in FILE_FOLDER_LABELS:
        base = folder_paths.get_directory_by_type(label)
        found = sorted(_names_below(base, ".safetensors", follow_links=False))
        names += [f"{name} [{label}]" for name in found]
    return names


def conditioning_path(name: str) -> Path:
    """Path of a name that `list_conditioning` gave; a bare name means the input folder. Raises ConfigError."""
    label = next((label for label in FILE_FOLDER_LABELS if name.endswith(f" [{label}]")), None)
    bare = name.removesuffix(f" [{label}]") if label else name
    # Compared as text: a link that lies in the folder is the user's own choice.
    base = os.path.abspath(folder_paths.get_directory_by_type(label or "input"))
    path = Path(os.path.normpath(os.path.join(base, bare)))
    if not path.is_relative_to(base) or not os.path.isfile(path):  # False for too long a name
        raise ConfigError(
            f"{name!r} is not a file in ComfyUI's input or output folder; refresh the list"
        )
    return path


def new_output_path(prefix: str, suffix: str) -> tuple[Path, str, str]:
    """A new file under the output folder as ComfyUI numbers them: its path, name and subfolder."""
    folder, stem, counter, subfolder, _ = folder_paths.get_save_image_path(
        prefix, folder_paths.get_output_directory()
    )
    name = f"{stem}_{counter:05}_{suffix}"
    return Path(folder) / name, name, subfolder


def log_folder() -> Path:
    """Where the groups' logs are kept."""
    return Path(folder_paths.get_user_directory()) / LOG_FOLDER
