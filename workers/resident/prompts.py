"""Prompts as a model has encoded them, kept between forwards that belong together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from comfy_wan_dist.mesh.workload import KEPT_TEXTS
from workers.model.wan import TextKeysValues

EncodedText = tuple[TextKeysValues, ...]


class EncodedPrompts:
    """The keys and values that one model made of the texts it was last given. Ranks of one tp, or fsdp, keep alike."""

    def __init__(self) -> None:
        self._encoded: OrderedDict[tuple[str, ...], EncodedText] = OrderedDict()

    def have(self, names: tuple[str, ...], encode: Callable[[], EncodedText]) -> EncodedText:
        """What `encode` makes of the texts of these names, one for each sample, or has made of them lately."""
        text = self._encoded.get(names)
        if text is None:
            text = self._encoded[names] = encode()
        self._encoded.move_to_end(names)
        while len(self._encoded) > KEPT_TEXTS:
            self._encoded.popitem(last=False)
        return text

    def clear(self) -> None:
        self._encoded.clear()
