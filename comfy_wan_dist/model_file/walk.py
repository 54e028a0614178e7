"""Walks through folders that hold much: what is in one is read again only once its time has changed, as for ComfyUI's
own lists."""

from __future__ import annotations

import functools
import os
import stat
from collections import deque
from collections.abc import Iterator

from .files import GGUF_SUFFIX, PIPELINE_NAME, SUFFIXES

MOST_FOLDERS = 2**17
KEPT = (*SUFFIXES, GGUF_SUFFIX, PIPELINE_NAME)


def walk_models(
    root: str, *, follow_links: bool
) -> Iterator[tuple[str, list[str], tuple[str, ...]]]:
    """Each folder below `root` once, from the top down and itself first: its path, the names of the folders in it, and
    those of model files and of pipelines' lists.

    What is taken out of the second is not entered, as in os.walk. A folder that cannot be read, or vanishes meanwhile,
    is left out.
    """
    left = deque([root])
    seen = set()
    while left:
        path = left.popleft()
        try:
            status = os.stat(path, follow_symlinks=follow_links or path == root)
            if not stat.S_ISDIR(status.st_mode) or (status.st_dev, status.st_ino) in seen:
                continue
            names, files = _contents(path, status.st_mtime_ns)
        except OSError:
            continue
        seen.add((status.st_dev, status.st_ino))
        folders = list(names)
        yield path, folders, files
        left.extend(os.path.join(path, name) for name in folders)


@functools.lru_cache(maxsize=MOST_FOLDERS)
def _contents(folder: str, _changed_ns: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_folder(entry):
                folders.append(entry.name)
            elif entry.name.endswith(KEPT):
                files.append(entry.name)
    return tuple(sorted(set(folders) - {".git"})), tuple(files)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False
