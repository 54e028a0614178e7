"""Build this rank's part of the transformer: meta model, cut, memory, then weights streamed in.

Peak memory is the rank's own shard and one read buffer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import init_empty_weights

from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.wan import WanFile
from workers.model.wan import FLOAT32_PARAMETERS, WanModel
from workers.parallel.collectives import AxisGroup
from workers.parallel.fsdp import apply_fsdp, local_part
from workers.parallel.plan import Slice, parameter_slice
from workers.parallel.stages import select_stage
from workers.parallel.tensor import apply_tensor_parallel

from .allocate import allocate_parameters
from .packed import apply_packing, official_name, packed_weights, read_scale
from .reader import TensorReader


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
    apply_packing(model, tp)
    # Cut before there is memory: no rank ever holds a whole replica.
    apply_fsdp(model, fsdp, device=device)
    return model.to_empty(device=device).eval()


def load_weights(
    model: WanModel,
    file: WanFile,
    *,
    tp: AxisGroup,
    fsdp: AxisGroup,
    report: Callable[[int, int], None],
) -> int:
    """Stream the file's weights into `model`; returns the bytes asked of the file.

    report(done, total) is called in bytes whenever another percent is done. Raises ModelFileError.
    """
    packed = packed_weights(model)
    parameters = {official_name(name): held for name, held in model.named_parameters()}
    # File order: one forward pass over the disk.
    stored = sorted(
        ((name, file.entries[name]) for name in parameters),
        key=lambda item: (item[1].entry.path, item[1].entry.start),
    )
    total = sum(tensor.entry.stop - tensor.entry.start for _, tensor in stored)
    done = 0
    with TensorReader() as reader, torch.no_grad():
        for name, tensor in stored:
            entry, weight = tensor.entry, packed.get(name)
            part = parameter_slice(name, entry.shape, tp_rank=tp.rank, tp_size=tp.size)
            first = part.start if part is not None and part.dim == 0 else 0
            columns = part if part is not None and part.dim == 1 else None
            target, rows = local_part(parameters[name], fsdp)
            if weight is not None:
                target = target.view(torch.uint8)
                columns = None if columns is None else weight.stored
            reader.read_into(
                target,
                entry if weight is None else tensor.as_bytes,
                rows=Slice(dim=0, start=first + rows.start, stop=first + rows.stop),
                columns=columns,
            )
            if weight is not None and tensor.scale is not None:
                read_scale(reader, tensor.scale, weight, name)
            percent = 100 * done // total
            done += entry.stop - entry.start
            if 100 * done // total > percent:
                report(done, total)
        return reader.bytes_read
