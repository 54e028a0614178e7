"""The node that ComfyUI executes: its progress bar, and the user's wish to stop."""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management
import comfy.utils


def check_interrupt() -> None:
    """Raise ComfyUI's own exception if the user asked to stop; only the executing node may call it."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def progress_bar() -> Callable[[int, int], None]:
    """ComfyUI's for the executing node; it is told how much is done, and of how much."""
    update: Callable[[int, int], None] = comfy.utils.ProgressBar(1).update_absolute
    return update
