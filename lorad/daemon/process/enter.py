"""Become another user for good, then a program: `python -I -S enter.py UID GID GROUPS CWD PROGRAM…`. Standard
library only; GROUPS are numbers with commas between them.

It begins with the powers of the daemon and ends without any: no capability, no setuid program that could give
one back (no_new_privs), no other group. CWD is entered as that user; what they may not enter becomes `/`.
"""

import ctypes
import os
import sys

_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITIES_V3 = 0x20080522
_UMASK = 0o077


def main() -> None:
    uid, gid, groups, cwd, *argv = sys.argv[1:]
    _drop(int(uid), int(gid), [int(group) for group in groups.split(",") if group])
    os.umask(_UMASK)
    try:
        os.chdir(cwd)
    except OSError:
        os.chdir("/")
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        sys.exit(f"lorad: cannot start {argv} as user {uid}: {error}")


def _drop(uid: int, gid: int, groups: list[int]) -> None:
    """Raises OSError; then nothing must be started."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if uid != 0:  # a daemon that is not root itself keeps its capabilities through setresuid
        _checked(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
        header, nothing = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
        _checked(libc.capset(header, nothing), "capabilities")
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
