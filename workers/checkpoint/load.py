"""Build this rank's part of the transformer: meta model, cut, memory, then weights streamed in.

Peak memory is the rank's own shard and one read buffer.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from accelerate import init_empty_weights

from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.wan import WanFile
from workers.model.wan import FLOAT32_PARAMETERS, WanModel
from workers.parallel.collectives import AxisGroup
from workers.parallel.fsdp import apply_fsdp
from workers.parallel.stages import select_stage
from workers.parallel.tensor import apply_tensor_parallel
from workers.quant.packed import apply_packing

from .allocate import allocate_parameters
from .part import own_parts
from .sharing import Milestone, ReadGroups, SharedReader, in_sections


def build_model(
    shape: WanShape,
    *,
    pp: AxisGroup,
    tp: AxisGroup,
    fsdp: AxisGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> WanModel:
    """This rank's shard with memory allocated and no values in it."""
    with init_empty_weights(include_buffers=True):
        model = WanModel(shape)
        select_stage(model, pp)
        apply_tensor_parallel(model, tp)

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if any(part in name for part in FLOAT32_PARAMETERS) else dtype

    allocate_parameters(model, dtype_of=dtype_of, device=torch.device("meta"))
    apply_packing(model)
    # Cut before there is memory: no rank ever holds a whole replica.
    apply_fsdp(model, fsdp, device=device)
    return model.to_empty(device=device).eval()


def load_weights(
    model: WanModel,
    file: WanFile,
    *,
    tp: AxisGroup,
    fsdp: AxisGroup,
    sharing: ReadGroups,
    milestone: Milestone,
    leave_out: Collection[str] = (),
) -> int:
    """Stream the file's weights into `model`, but for the parameters `leave_out`; returns the bytes asked of the file.

    Collectives: those of the milestones and of `SharedReader`. Raises ModelFileError.
    """
    parts = [
        part for part in own_parts(model, file, tp=tp, fsdp=fsdp) if part.name not in leave_out
    ]
    with SharedReader(sharing) as reader, torch.no_grad():
        for section, done, total in in_sections(parts, lambda part: part.file_bytes):
            with reader.in_step():
                for part in section:
                    part.load(reader)
            milestone(done, total, reader.error)
        return reader.bytes_read
