"""torch.compile, one block at a time. Collectives stay outside: each is a graph break."""

from __future__ import annotations

from workers.model.wan import WanModel


def compile_blocks(model: WanModel, *, backend: str = "inductor") -> None:
    """Compile every block in place; they share one piece of code, so the first block's compilation serves all."""
    for block in model.blocks.values():
        block.compile(backend=backend)
