"""FSDP: the replicas of a plane share every block's weights.

Each rank keeps 1/size of the rows of each parameter of its blocks. A block is gathered when it runs and dropped after
it, so a rank holds its part and a block or two. Embeddings and the head, a hundredth of the weights, stay whole.
Every rank of the group must run the same blocks in the same order.
Source: PyTorch FSDP (arXiv 2304.11277), in torch's `fully_shard`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from workers.model.wan import WanModel

from .collectives import AxisGroup, gather_into


class BookedGather:
    """How `fully_shard` gathers a block: as it would, with the call in the ledger.

    Collectives: one all-gather on fsdp of a block's part, in uint8 if the block has parameters of several dtypes.
    """

    def __init__(self, fsdp: AxisGroup) -> None:
        self.fsdp = fsdp

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self.fsdp.ledger.book("all_gather", self.fsdp.axis, input_tensor):
            return gather_into(output_tensor, input_tensor, group, async_op=async_op)


def apply_fsdp(model: WanModel, fsdp: AxisGroup, *, device: torch.device) -> None:
    """Cut the blocks' parameters over `fsdp`; at size 1 nothing changes.

    Call it on the meta device, after the other cuts, and give the model memory with `to_empty`. `device` is where it
    will run. Raises ConfigError if this torch cannot do it.
    """
    if fsdp.size == 1:
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise ConfigError(
            f"fsdp needs a newer torch than {torch.__version__}; update torch or leave fsdp out of the mesh"
        )
    assert fsdp.group is not None
    mesh = DeviceMesh.from_group(fsdp.group, device.type)
    gather: Any = BookedGather(fsdp)  # torch names the interface in a private module only
    for block in model.blocks.values():
        sharded = fully_shard(block, mesh=mesh, reshard_after_forward=True)
        sharded.set_custom_all_gather(gather)
        register_fsdp_forward_method(block, "encode_text")
    whole = {
        parameter for name, parameter in model.named_parameters() if not name.startswith("blocks.")
    }
    # The model itself orders the blocks' gathers; it is entered by these methods, whatever the stage.
    fully_shard(model, mesh=mesh, ignored_params=whole)
    for method in ("encode_text", "run_blocks"):
        register_fsdp_forward_method(model, method)


def local_part(parameter: Tensor, fsdp: AxisGroup) -> tuple[Tensor, range]:
    """What this rank has of a parameter, and which of the parameter's rows these are."""
    from torch.distributed.tensor import DTensor

    rows = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return parameter, range(rows)
    per_rank = -(-rows // fsdp.size)  # the last ranks may have fewer, or none
    start = min(fsdp.rank * per_rank, rows)
    local = parameter.to_local()
    assert local.shape[0] == min(per_rank, rows - start)
    return local, range(start, start + local.shape[0])
