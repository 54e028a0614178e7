"""The node that ComfyUI executes: its progress bar, and the user's wish to stop."""

from __future__ import annotations

import comfy.model_management
import comfy.utils


def check_interrupt() -> None:
    """Raise ComfyUI's own exception if the user asked to stop; only the executing node may call it."""
    comfy.model_management.throw_exception_if_processing_interrupted()


class ProgressReporter:
    """ComfyUI's progress bar for the executing node."""

    def __init__(self) -> None:
        self._bar = comfy.utils.ProgressBar(1)

    def update(self, done: int, total: int) -> None:
        self._bar.update_absolute(done, total)
