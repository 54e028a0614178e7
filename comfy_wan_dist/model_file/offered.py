"""The names under which ComfyUI's lists offer models, and the folders that such names mean.

A file's name is its path below the folder of its kind, as everywhere in ComfyUI. A model that is a folder takes the
place of its files: `Wan2.2-TI2V-5B/`, or `Wan2.2-TI2V-5B-Diffusers [diffusers]` for one in the folders that ComfyUI
keeps for diffusers. What is not listed is no worse a name: a shard of a listed folder, or the `transformer` in one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .files import COMPONENT_FILE, PIPELINE_NAME, index_of
from .walk import walk_models

PIPELINE_LABEL = " [diffusers]"


def listed_names(
    files: Sequence[str], roots: Sequence[str], pipeline_roots: Sequence[str], *, component: str
) -> list[str]:
    """The list for one kind of model.

    files: names of those below `roots`, as ComfyUI lists them. component: the subfolder that a folder of diffusers,
    below `roots` or `pipeline_roots`, must have.
    """
    is_pipeline = functools.cache(
        lambda folder: any(_is_pipeline(os.path.join(root, folder), component) for root in roots)
    )

    @functools.cache
    def pipeline_of(folder: str) -> str | None:
        """The outermost pipeline that a folder is or lies in."""
        outer = os.path.dirname(folder)
        around = pipeline_of(outer) if outer else None
        return around or (folder if is_pipeline(folder) else None)

    def folder_of(file: str) -> str | None:
        """The folder that is listed in place of a file."""
        folder = os.path.dirname(file)
        if not folder:
            return None
        if pipeline := pipeline_of(folder):
            return pipeline
        indices = (index_of(Path(root, file)) for root in roots)
        is_part = os.path.basename(file) == COMPONENT_FILE or any(
            index is not None and os.path.isfile(index) for index in indices
        )
        return folder if is_part else None

    folder_by_file = {name: folder_of(name) for name in files}
    folders = {folder for folder in folder_by_file.values() if folder is not None}
    pipelines = {
        os.path.relpath(folder, root)
        for root in pipeline_roots
        for folder in _pipelines_below(root, component)
    }
    return [
        *(f"{folder}/" for folder in sorted(_without_detours(folders, roots))),
        *(f"{folder}{PIPELINE_LABEL}" for folder in sorted(pipelines)),
        *(name for name, folder in folder_by_file.items() if folder is None),
    ]


def folder_named(name: str, roots: Sequence[str], pipeline_roots: Sequence[str]) -> str | None:
    """The folder that `name` means, below one of the roots whatever it says, or None if there is none."""
    bare = os.path.normpath("/" + name.removesuffix(PIPELINE_LABEL)).lstrip("/")
    bases = pipeline_roots if name.endswith(PIPELINE_LABEL) else roots
    paths = (os.path.join(base, bare) for base in bases if bare)
    return next((path for path in paths if os.path.isdir(path)), None)


def _is_pipeline(folder: str, component: str) -> bool:
    return os.path.isfile(os.path.join(folder, PIPELINE_NAME)) and os.path.isdir(
        os.path.join(folder, component)
    )


def _pipelines_below(root: str, component: str) -> Iterator[str]:
    for folder, folders, files in walk_models(root, follow_links=True):
        if folder != root and PIPELINE_NAME in files:
            if component in folders:
                yield folder
            folders.clear()


def _without_detours(folders: Iterable[str], roots: Sequence[str]) -> list[str]:
    """One name, the shortest, of each folder; where links lead in a circle there are many."""
    found: dict[tuple[str, ...], str] = {}
    for folder in sorted(folders, key=lambda name: (len(name), name)):
        places = tuple(os.path.realpath(os.path.join(root, folder)) for root in roots)
        found.setdefault(places, folder)
    return list(found.values())
