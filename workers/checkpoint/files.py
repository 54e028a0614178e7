"""Where a job's model files lie on this rank's machine, and whether they are the ones that the job was made for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.ipc.messages import LoraSpec, ModelSpec, VAESpec
from comfy_wan_dist.model_file.header import ModelFile, content_of, read_model_file
from comfy_wan_dist.model_file.walk import walk_models

Spec = ModelSpec | LoraSpec | VAESpec


class ModelFiles(Protocol):
    """The model files as a rank sees them."""

    def read(self, spec: Spec) -> ModelFile:
        """The file's header as it is now. Raises ModelFileError if it is not the file that `spec` describes."""
        ...


class GivenFiles:
    """Files of ComfyUI's machine: the paths are true, and size and time of change tell a replaced file."""

    def read(self, spec: Spec) -> ModelFile:
        file = read_model_file(spec.path)
        if (file.file_bytes, file.mtime_ns) != (spec.file_bytes, spec.mtime_ns):
            raise ModelFileError(
                f"{spec.path} changed after the job was made; run it again when the file is complete"
            )
        return file


class CopiedFiles:
    """Files of another machine: one of the same size at the same path, or of the same name below a folder.

    A transformer's or a LoRA's must also have the same weights, as far as `content_of` sees them.
    """

    def __init__(self, *, folder: Path | None, machine: str) -> None:
        """machine: its name, for messages."""
        self._folder = folder
        self._machine = machine

    def read(self, spec: Spec) -> ModelFile:
        seen = []
        for path in self._candidates(Path(spec.path)):
            if not os.path.isfile(path):
                continue
            try:
                file = read_model_file(str(path))
                if file.file_bytes != spec.file_bytes:
                    seen.append(f"{path} has {file.file_bytes} bytes")
                elif not isinstance(spec, VAESpec) and content_of(file) != spec.content:
                    seen.append(f"{path} has other weights")
                else:
                    return file
            except ModelFileError as error:  # the right one may be elsewhere
                seen.append(f"{path} is of no use ({error})")
        where = "" if self._folder is None else f" or below {self._folder}"
        raise ModelFileError(
            f"machine {self._machine} has no file of {spec.file_bytes} bytes at {spec.path}{where}"
            f"{''.join(f', and {one}' for one in seen)}; copy it there, or start its worker with --models FOLDER"
        )

    def _candidates(self, path: Path) -> Iterator[Path]:
        yield path
        if self._folder is not None:
            for folder, _, names in walk_models(str(self._folder), follow_links=True):
                if path.name in names:
                    yield Path(folder, path.name)
