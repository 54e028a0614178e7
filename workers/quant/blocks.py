"""Blocks of GGUF and their values: all forms that files have unpacked, and values packed as Q8_0.

A block is some values of a row with what scales them. The arithmetic of both ways is float32 in the order of the
reference, so that the values are the same to the last bit; what is left is whole-tensor operations on the weight's own
device.

Shape letters: R rows, N blocks of a row, S bytes of a block, and G groups of a block, which have scales of their own.
Source: ggml's block layouts and rounding, as in `gguf.quants`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from comfy_wan_dist.mesh.dtypes import BLOCKS


def unpack_blocks(data: Tensor, encoding: str) -> Tensor:
    """Rows of blocks [R, N*S] uint8 -> values [R, N*items] float32."""
    _, size = BLOCKS[encoding]
    blocks_RNS = data.unflatten(1, (-1, size))
    return UNPACKERS[encoding](blocks_RNS).flatten(1)


def pack_q8_0(values: Tensor) -> Tensor:
    """Rows of values [R, N*32] float32 -> rows of blocks [R, N*34] uint8.

    A block is a float16 scale and 32 whole numbers from -127 to 127.
    A value is off by no more than half a 127th of the largest of its block, and what the scale is rounded by.
    """
    items, _ = BLOCKS["Q8_0"]
    blocks_RN32 = values.unflatten(1, (-1, items))
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


def half(bytes_: Tensor) -> Tensor:
    """Pairs of bytes [..., 2] as float16 -> [..., 1] float32."""
    return bytes_.contiguous().view(torch.float16).float()


def bits(bytes_: Tensor, shifts: range, mask: int) -> Tensor:
    """The same bits of every byte, from each of `shifts` on: [..., n] -> [..., len(shifts), n]."""
    return torch.stack([(bytes_ >> shift) & mask for shift in shifts], dim=-2)


def nibbles(bytes_: Tensor) -> Tensor:
    """Low halves, then high ones: [..., n] -> [..., 2, n]."""
    return bits(bytes_, range(0, 8, 4), 15)


def fifth_bits(bytes_: Tensor) -> Tensor:
    """[..., 4] -> the 32 bits, lowest first: [..., 32]."""
    return bits(bytes_, range(8), 1).transpose(-1, -2).flatten(-2)


def joined(low: Tensor, high: Tensor) -> Tensor:
    """low + 16 * high. Overwrites `high`: memory is what unpacking is short of."""
    return high.bitwise_left_shift_(4).bitwise_or_(low)


def unpack_q4_0(blocks: Tensor) -> Tensor:
    values = nibbles(blocks[..., 2:]).flatten(-2).float().sub_(8)
    return values.mul_(half(blocks[..., :2]))


def unpack_q4_1(blocks: Tensor) -> Tensor:
    values = nibbles(blocks[..., 4:]).flatten(-2).float()
    return values.mul_(half(blocks[..., :2])).add_(half(blocks[..., 2:4]))


def unpack_q5_0(blocks: Tensor) -> Tensor:
    values = joined(nibbles(blocks[..., 6:]).flatten(-2), fifth_bits(blocks[..., 2:6])).float()
    return values.sub_(16).mul_(half(blocks[..., :2]))


def unpack_q5_1(blocks: Tensor) -> Tensor:
    values = joined(nibbles(blocks[..., 8:]).flatten(-2), fifth_bits(blocks[..., 4:8])).float()
    return values.mul_(half(blocks[..., :2])).add_(half(blocks[..., 2:4]))


def unpack_q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].view(torch.int8).float().mul_(half(blocks[..., :2]))


def unpack_q2_k(blocks: Tensor) -> Tensor:
    scales, quants = blocks[..., :16], blocks[..., 16:80]
    scale_G1 = ((scales & 15).float() * half(blocks[..., 80:82])).unsqueeze(-1)
    least_G1 = ((scales >> 4).float() * half(blocks[..., 82:84])).unsqueeze(-1)
    values = bits(quants.unflatten(-1, (2, 32)), range(0, 8, 2), 3).flatten(-3).float()
    return values.unflatten(-1, (16, 16)).mul_(scale_G1).sub_(least_G1).flatten(-2)


def unpack_q3_k(blocks: Tensor) -> Tensor:
    high, quants, scales = blocks[..., :32], blocks[..., 32:96], blocks[..., 96:108]
    low_scales = nibbles(scales[..., :8]).flatten(-2)
    high_scales = bits(scales[..., 8:], range(0, 8, 2), 3).flatten(-2)
    scale_G = joined(low_scales, high_scales).float().sub_(32).mul_(half(blocks[..., 108:]))
    # A bit of `high` that is not set stands for 4 less.
    values = bits(high, range(8), 1).flatten(-2).bitwise_left_shift_(2)
    values.add_(bits(quants.unflatten(-1, (2, 32)), range(0, 8, 2), 3).flatten(-3))
    values = values.float().sub_(4)
    return values.unflatten(-1, (16, 16)).mul_(scale_G.unsqueeze(-1)).flatten(-2)


def unpack_q4_k(blocks: Tensor) -> Tensor:
    values_G32 = nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-3, -2)
    return _scale_k(values_G32.float(), blocks)


def unpack_q5_k(blocks: Tensor) -> Tensor:
    low_G32 = nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-3, -2)
    return _scale_k(joined(low_G32, bits(blocks[..., 16:48], range(8), 1)).float(), blocks)


def unpack_q6_k(blocks: Tensor) -> Tensor:
    scale_G = blocks[..., 192:208].view(torch.int8).float().mul_(half(blocks[..., 208:]))
    values = joined(
        nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-3),
        bits(blocks[..., 128:192].unflatten(-1, (2, 32)), range(0, 8, 2), 3).flatten(-3),
    ).float()
    return values.sub_(32).unflatten(-1, (16, 16)).mul_(scale_G.unsqueeze(-1)).flatten(-2)


def _scale_k(values_G32: Tensor, blocks: Tensor) -> Tensor:
    """values * scale - least in place, with the eight scales and minima that Q4_K and Q5_K pack in 6 bits each."""
    scales, leasts, both = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale_G = torch.cat([scales & 63, (both & 15) | ((scales >> 2) & 48)], dim=-1)
    least_G = torch.cat([leasts & 63, (both >> 4) | ((leasts >> 2) & 48)], dim=-1)
    scale_G1 = scale_G.float().mul_(half(blocks[..., :2])).unsqueeze(-1)
    least_G1 = least_G.float().mul_(half(blocks[..., 2:4])).unsqueeze(-1)
    return values_G32.mul_(scale_G1).sub_(least_G1).flatten(-2)


UNPACKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": unpack_q4_0,
    "Q4_1": unpack_q4_1,
    "Q5_0": unpack_q5_0,
    "Q5_1": unpack_q5_1,
    "Q8_0": unpack_q8_0,
    "Q2_K": unpack_q2_k,
    "Q3_K": unpack_q3_k,
    "Q4_K": unpack_q4_k,
    "Q5_K": unpack_q5_k,
    "Q6_K": unpack_q6_k,
}
"""Blocks [R, N, S] uint8 -> values [R, N, items] float32."""
