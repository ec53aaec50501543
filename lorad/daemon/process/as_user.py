"""Files as another user opens them: the identity that the kernel asks for at each path, of one thread, for a
while.

`setfsuid` and `setfsgid` (Linux) change what this thread may open and whose its new files are, and nothing
that other processes could use against it; the C library's `setgroups` would change all threads, so the system
call is made here. Capabilities that pass over the mode of files are laid aside meanwhile, as a daemon that is
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
_KEPT = 1 << 6 | 1 << 7  # CAP_SETGID and CAP_SETUID: the way back

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
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    data = (ctypes.c_uint32 * 6)()  # the effective, permitted and inheritable ones of this thread
    _checked(_libc.capget(header, data))
    effective, permitted, inheritable = (a | b << 32 for a, b in zip(data[:3], data[3:], strict=True))
    powers = (effective, permitted, inheritable)
    _now.uid = user.uid
    try:
        _set_groups(user.groups)
        _set_fs(_libc.setfsgid, user.gid)
        _set_fs(_libc.setfsuid, user.uid)
        _set_capabilities(powers, effective=powers[0] & _KEPT)
        yield
    finally:
        _set_capabilities(powers, effective=powers[0] & _KEPT)
        _set_fs(_libc.setfsuid, uid)
        _set_fs(_libc.setfsgid, gid)
        _set_groups(tuple(groups))
        _set_capabilities(powers, effective=powers[0])
        _now.uid = None


def _set_groups(groups: tuple[int, ...]) -> None:
    number = _SYS_SETGROUPS.get(platform.machine())
    if number is None:
        raise OSError(38, f"a shared daemon knows no way to act as a user on {platform.machine()}")
    array = (ctypes.c_uint32 * max(1, len(groups)))(*groups)
    _checked(_libc.syscall(number, len(groups), array))


def _set_fs(change: ctypes._NamedFuncPointer, number: int) -> None:
    """Change the user or group for files, and check it: setfsuid and setfsgid report no failure, only the old
    value.
    """
    change(ctypes.c_uint32(number))
    if change(ctypes.c_uint32(0xFFFFFFFF)) & 0xFFFFFFFF != number:
        raise PermissionError(1, f"this daemon may not act as user or group {number}")


def _set_capabilities(powers: tuple[int, int, int], *, effective: int) -> None:
    """Keep the capabilities of `powers` but make only `effective` effective."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    sets = (effective, *powers[1:])
    data = (ctypes.c_uint32 * 6)(*(part & 0xFFFFFFFF for part in sets), *(part >> 32 for part in sets))
    _checked(_libc.capset(header, data))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
