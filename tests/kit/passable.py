"""`python -m tests.kit.passable COMMAND…`: a command that other users than root can run this Python in.

Where the interpreter lies in a directory that is closed to others, as root's home, it is opened to them in a
mount namespace of this process alone: nobody else sees it, and it is gone with the process.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lorad.daemon.process.shared_home import closed_part
from tests.kit.warm.client import PLACE

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
_CLOSED = closed_part(Path(sys.executable).resolve())
# nothing where the interpreter is everybody's, as a distribution's is
PASSABLE = [] if _CLOSED is None else [sys.executable, "-m", "tests.kit.passable"]
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why other users cannot be tried here; "" where they can."""
    if os.geteuid() != 0:
        return "needs root: it runs processes of other users"
    if PASSABLE and subprocess.run([*PASSABLE, "true"], capture_output=True).returncode:
        return "needs a mount namespace: this Python is in a directory that is closed to other users"
    return ""


def make_passable() -> None:
    """Let other users run this Python, in this process and its children from now on.

    Raises OSError where that is not permitted.
    """
    if _CLOSED is None:
        return
    base = Path(sys.base_prefix).resolve()
    os.environ.pop(PLACE, None)  # what the warm process forks does not have this namespace
    checked(_libc.unshare(CLONE_NEWNS))
    mount(None, Path("/"), MS_REC | MS_PRIVATE)
    aside = Path(tempfile.mkdtemp())
    try:
        mount(base, aside, MS_BIND | MS_REC)
        checked(_libc.mount(b"none", os.fsencode(_CLOSED), b"tmpfs", 0, b"mode=0755"))
        base.mkdir(parents=True)
        mount(aside, base, MS_BIND | MS_REC)
    finally:
        _libc.umount2(os.fsencode(aside), MNT_DETACH)
        aside.rmdir()  # never more than an empty directory: what is mounted there is the real one


def mount(source: Path | None, target: Path, flags: int) -> None:
    checked(_libc.mount(os.fsencode(source or "none"), os.fsencode(target), None, flags, None))


def checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    make_passable()
    os.execvp(sys.argv[1], sys.argv[1:])
