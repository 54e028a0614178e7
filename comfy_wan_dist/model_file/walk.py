"""Walks through folders that hold much: what is in one is read again only once its time has changed, as for ComfyUI's
own lists."""

from __future__ import annotations

import functools
import os
import stat
from collections import deque
from collections.abc import Iterator

from .files import GGUF_SUFFIX, PIPELINE_NAME, SUFFIXES, has_suffix

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
            names, files = _contents(path, status)
        except OSError:
            continue
        seen.add((status.st_dev, status.st_ino))
        yield path, names, files
        left.extend(os.path.join(path, name) for name in names)


class _Folder:
    """What was in a folder when it was last read; of links it is asked each time where they lead."""

    def __init__(self) -> None:
        self.version: tuple[int, int, int] | None = None
        self.folders: list[str] = []
        self.links: list[str] = []
        self.files: list[str] = []

    def read(self, path: str) -> None:
        self.folders, self.links, self.files = [], [], []
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_symlink():
                    self.links.append(entry.name)
                elif entry.is_dir():
                    self.folders.append(entry.name)
                elif has_suffix(entry.name, KEPT):
                    self.files.append(entry.name)


@functools.lru_cache(maxsize=MOST_FOLDERS)
def _remembered(_path: str) -> _Folder:
    return _Folder()


def _contents(path: str, status: os.stat_result) -> tuple[list[str], tuple[str, ...]]:
    """Folders and files in it. A path may lead to another folder of the same time than before."""
    folder = _remembered(path)
    version = (status.st_dev, status.st_ino, status.st_mtime_ns)
    if folder.version != version:
        folder.version = None
        folder.read(path)
        folder.version = version
    leads = {name: os.path.isdir(os.path.join(path, name)) for name in folder.links}
    folders = {*folder.folders, *(name for name, is_folder in leads.items() if is_folder)}
    files = [name for name, is_folder in leads.items() if not is_folder and has_suffix(name, KEPT)]
    return sorted(folders - {".git"}), (*folder.files, *files)
