"""The pool's Unix socket: for its owner (and root) only."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from lorad.errors import Conflict

BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def listen(path: Path) -> socket.socket:
    """A non-blocking listener at `path`, mode 0600 before anyone can connect.

    A socket on which nobody answers is replaced. Raises Conflict when a pool answers there.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def may_call(peer: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user or to root (SO_PEERCRED)."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(data)[1] in (os.getuid(), 0)


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            remove(path)
            return
    raise Conflict(f"another pool answers on {path}", hint="Stop it first; `lorad pools` lists them.")
