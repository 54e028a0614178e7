"""Stream a file's weights into a rank's shard. Peak memory is the shard and one read buffer."""

from __future__ import annotations

from collections.abc import Collection

import torch

from comfy_wan_dist.model_file.wan import WanFile
from workers.model.wan import WanModel
from workers.parallel.groups import MeshGroups

from .part import own_parts
from .sharing import Milestone, ReadGroups, SharedReader, in_sections


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by torch's name for it."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_weights(
    model: WanModel,
    file: WanFile,
    groups: MeshGroups,
    *,
    sharing: ReadGroups,
    milestone: Milestone,
    leave_out: Collection[str] = (),
) -> int:
    """Stream the file's weights into `model`, but for the parameters `leave_out`; returns the bytes asked of the file.

    Collectives: those of the milestones and of `SharedReader`. Raises ModelFileError.
    """
    parts = [part for part in own_parts(model, file, groups) if part.name not in leave_out]
    with SharedReader(sharing) as reader, torch.no_grad():
        for section, done, total in in_sections(parts, lambda part: part.file_bytes):
            with reader.in_step():
                for part in section:
                    part.load(reader)
            milestone(done, total, reader.error)
        return reader.bytes_read
