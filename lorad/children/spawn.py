"""Start a process under a guard without asyncio: see `guard.py`."""

import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from lorad.children import guard


def spawn(
    argv: Sequence[str], *, locks: Sequence[int] = (), passed: Sequence[int] = (), **options: Any
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a process under a guard. Return the guard, and a socket to it. Raises OSError.

    The child's pid can be read from the socket. The guard ends the child once the socket is closed.

    Args:
        locks: File descriptors of locks that the guard holds until nothing of the child is left.
        passed: File descriptors that the child inherits.
        options: Popen's own, for the guard and so for the child.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        fds = [theirs.fileno(), *locks]
        try:
            process = subprocess.Popen(guard.command(argv, *fds), pass_fds=[*fds, *passed], **options)
        except BaseException:
            ours.close()
            raise
    return process, ours
