"""A model's weights in host memory for a while, so that its device has room for something else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OffloadedWeights:
    """Weights that were moved to host memory: `bring_back` moves them to the device again, into the same tensors.

    The model keeps its tensors; they have no memory meanwhile, and nothing may run it. Parts that fsdp cuts are moved
    as this rank holds them. Memory that other tensors share with the weights goes and comes with them; what NumPy has
    seen stays.
    """

    def __init__(self, model: nn.Module) -> None:
        """Move the weights of `model` away. Raises torch.OutOfMemoryError or RuntimeError, with none moved."""
        self._kept = [(storage, _host_copy(storage)) for storage in _storages(model)]
        for storage, _ in self._kept:
            storage.resize_(0)

    @property
    def bytes(self) -> int:
        """What is still in host memory."""
        return sum(copy.nbytes() for _, copy in self._kept)

    def bring_back(self) -> None:
        """Raises torch.OutOfMemoryError; what is back by then stays, and it may be called again."""
        while self._kept:
            storage, copy = self._kept[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self._kept.pop()


def weight_bytes(model: nn.Module) -> int:
    """What offloading the model moves."""
    return sum(storage.nbytes() for storage in _storages(model))


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes(), device="cpu").copy_(storage)


def _storages(model: nn.Module) -> list[torch.UntypedStorage]:
    storages = (_local(parameter).untyped_storage() for parameter in model.parameters())
    movable = (storage for storage in storages if storage.nbytes() and storage.resizable())
    return list({storage._cdata: storage for storage in movable}.values())


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
