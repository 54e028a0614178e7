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
        self._shown = (0, 0)

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` is done, unless that is what is shown."""
        if self._shown == (done, total):
            return
        # A bar may keep back what is hardly above the last value it sent, such as the first steps after a load.
        if done < self._shown[0] or total != self._shown[1]:
            self._bar = comfy.utils.ProgressBar(total)
        self._shown = (done, total)
        self._bar.update_absolute(done, total)
