"""What the system lets this process do of what a worker group does beside computing."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..group.folder import PrivateFolder
from ..group.process import has_pidfds
from ..group.spec import LOG_FOLDER, PACK_ROOT


@dataclass(frozen=True, kw_only=True, slots=True)
class Permissions:
    """unwritable_log: what keeps groups from writing their logs, if anything does. folder_error: what keeps them from
    making a private folder. noexec: where temporary files lie, if they cannot be run there.
    """

    has_pidfds: bool = True
    unwritable_log: Path | None = None
    folder_error: str = ""
    noexec: str = ""

    def lacking(self) -> list[str]:
        """A sentence for whatever is refused that groups work without."""
        found = []
        if not self.has_pidfds:
            found.append(
                "pidfd_open or pidfd_send_signal is refused, so the end of a rank is noticed up to 50 ms late; use a "
                "sandbox that allows the calls, such as the seccomp profile of Docker 20.10.10 or newer."
            )
        if self.unwritable_log is not None:
            found.append(
                f"{self.unwritable_log} cannot be written, so logs of worker groups go to the folder of temporary "
                "files; give it to the user that ComfyUI runs as."
            )
        if self.noexec:
            found.append(
                f"What lies in {self.noexec} cannot be run, so `compile` does not work; let TMPDIR name another folder."
            )
        return found


def examine_permissions() -> Permissions:
    """This process's, with ComfyUI's user folder where it usually is."""
    error = noexec = ""
    try:
        PrivateFolder().remove()
        if os.statvfs(tempfile.gettempdir()).f_flag & os.ST_NOEXEC:
            noexec = tempfile.gettempdir()
    except OSError as refused:
        error = str(refused)
    return Permissions(
        has_pidfds=has_pidfds(),
        unwritable_log=unwritable_log(PACK_ROOT.parent.parent / "user"),
        folder_error=error,
        noexec=noexec,
    )


def unwritable_log(user: Path) -> Path | None:
    """What keeps groups from writing their logs below ComfyUI's folder `user`.

    None if nothing does, or there is no such folder.
    """
    folder = user / LOG_FOLDER
    try:
        if not folder.exists():
            folder = user
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            return folder
        return next((log for log in folder.glob("*.log") if not os.access(log, os.W_OK)), None)
    except PermissionError:  # it may not even be looked into
        return user
