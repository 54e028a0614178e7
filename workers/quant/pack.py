"""Values into blocks of GGUF's Q8_0: a float16 scale and 32 whole numbers from -127 to 127.

A value is off by no more than half a 127th of the largest of its block, and what the scale is rounded by.
Source: ggml's block layout and rounding, as in `gguf.quants`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ITEMS = 32


def pack_q8_0(values: Tensor) -> Tensor:
    """Rows of values [R, N*32] float32 -> rows of blocks [R, N*34] uint8."""
    blocks_RN32 = values.unflatten(1, (-1, ITEMS))
    scale_RN1 = blocks_RN32.abs().amax(-1, keepdim=True).div_(127)
    inverse = torch.where(scale_RN1 == 0, 0, 1 / scale_RN1)
    scaled = blocks_RN32 * inverse
    # Halves are rounded away from zero.
    size = scaled.abs()
    whole = size.floor()
    whole += (size.sub_(whole).mul_(2)).floor_()
    quants = whole.copysign_(scaled).to(torch.int8)
    parts = (scale_RN1.half().view(torch.uint8), quants.view(torch.uint8))
    return torch.cat(parts, -1).flatten(1)
