"""Runs a command for which the kernel refuses pidfds, as old seccomp profiles and gVisor do.

    python tests/kits/without_pidfd.py ERRNO COMMAND...

ERRNO names the error, EPERM or ENOSYS. Source of the filter: Linux, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434  # on every architecture
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ALLOW, FAIL = 0x7FFF0000, 0x00050000
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06


def refuse_pidfds(number: int) -> None:
    """From now on, here and in whatever this process starts."""
    program = ctypes.create_string_buffer(
        b"".join(
            struct.pack("=HBBI", *instruction)
            for instruction in (
                (LOAD_NUMBER, 0, 0, 0),
                (JUMP_IF_EQUAL, 2, 0, PIDFD_OPEN),
                (JUMP_IF_EQUAL, 1, 0, PIDFD_SEND_SIGNAL),
                (RETURN, 0, 0, ALLOW),
                (RETURN, 0, 0, FAIL | number),
            )
        )
    )
    filter_ = struct.pack("@HP", 5, ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse_pidfds(getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
