"""What the system lets this process do of what a worker group does beside computing."""

from __future__ import annotations

import os
from pathlib import Path


def unwritable_log(user: Path) -> Path | None:
    """What keeps groups from writing their logs below ComfyUI's folder `user`, where comfyui/folders.py puts them.

    None if nothing does, or there is no such folder.
    """
    folder = user / "wan_dist_logs"
    if not folder.exists():
        folder = user
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
        return folder
    return next((log for log in folder.glob("*.log") if not os.access(log, os.W_OK)), None)
