"""Rotary tables that a rank has made for the sizes of its latest forwards."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from comfy_wan_dist.mesh.shape import LatentGrid
from workers.model.tokens import rope_table

MOST_TABLES = 4


class RopeTables:
    """Gives what `rope_table` does, which takes longer than all else that a forward begins with."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[LatentGrid, int, int], Tensor] = OrderedDict()

    def __call__(self, grid: LatentGrid, start: int, stop: int, *, device: torch.device) -> Tensor:
        key = (grid, start, stop)
        if key not in self._tables:
            self._tables[key] = rope_table(grid, start, stop, device=device)
        self._tables.move_to_end(key)
        while len(self._tables) > MOST_TABLES:
            self._tables.popitem(last=False)
        return self._tables[key]
