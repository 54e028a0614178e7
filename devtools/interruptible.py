"""A command that Ctrl-C ends, however its starter was started.

A shell without job control starts its background jobs with SIGINT ignored, and what is ignored stays so in every
process below, which then neither ends by SIGINT nor raises KeyboardInterrupt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

# A process of one's own, not preexec_fn, which may hang where threads run. It becomes the command and keeps its id.
RESTORE = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"


def interruptible(command: Sequence[str]) -> list[str]:
    """`command`, started with SIGINT at its default."""
    return [sys.executable, "-I", "-S", "-c", RESTORE, *command]
