"""Let one thread open files as another user for a while.

`setfsuid` and `setfsgid` (Linux) change what this thread may open and who owns its new files, and nothing
that other processes could use against it. The C library's `setgroups` would change all threads, so the system
call is made here. Capabilities that override the mode of files are laid aside meanwhile, as a daemon that is
not root keeps them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Iterator

from lorad.daemon.process.users import User

_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159}
_CAPABILITIES_V3 = 0x20080522
_WAY_BACK = 1 << 6 | 1 << 7  # CAP_SETGID and CAP_SETUID

_libc = ctypes.CDLL(None, use_errno=True)
_now = threading.local()


@contextlib.contextmanager
def as_user(user: User | None) -> Iterator[None]:
    """Have this thread open, make and remove files as `user` within the block; None: as itself.

    Nothing may be awaited in it, and no thread or process be started: it would begin as that user. Raises
    OSError where this process lacks the power. A user within a user is refused (RuntimeError).
    """
    if user is None or user.uid == os.getuid() == 0:
        yield
        return
    if getattr(_now, "uid", None) is not None:
        raise RuntimeError(f"this thread acts as user {_now.uid} already")
    groups = os.getgroups()
    gid = os.getegid()
    uid = os.geteuid()
    powers = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their high halves
    _checked(_libc.capget((ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), powers))
    _now.uid = user.uid
    try:
        _set_groups(user.groups)
        _set_fs(_libc.setfsgid, user.gid)
        _set_fs(_libc.setfsuid, user.uid)
        _set_capabilities(powers, _WAY_BACK)
        yield
    finally:
        _set_capabilities(powers, _WAY_BACK)
        _set_fs(_libc.setfsuid, uid)
        _set_fs(_libc.setfsgid, gid)
        _set_groups(tuple(groups))
        _set_capabilities(powers, ~0)
        _now.uid = None


def _set_groups(groups: tuple[int, ...]) -> None:
    number = _SYS_SETGROUPS.get(platform.machine())
    if number is None:
        raise OSError(38, f"a shared daemon knows no way to act as a user on {platform.machine()}")
    array = (ctypes.c_uint32 * max(1, len(groups)))(*groups)
    _checked(_libc.syscall(number, len(groups), array))


def _set_fs(change: ctypes._NamedFuncPointer, number: int) -> None:
    """Change the user or group for files, and check it, as setfsuid and setfsgid report no failure."""
    change(ctypes.c_uint32(number))
    if change(ctypes.c_uint32(0xFFFFFFFF)) & 0xFFFFFFFF != number:
        raise PermissionError(1, f"this daemon may not act as user or group {number}")


def _set_capabilities(powers: ctypes.Array[ctypes.c_uint32], mask: int) -> None:
    """Give this thread the `powers` that capget reported, of which only those in `mask` are effective."""
    low = powers[0] & mask
    high = powers[3] & mask >> 32
    sets = (ctypes.c_uint32 * 6)(low, *powers[1:3], high, *powers[4:])
    _checked(_libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), sets))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
