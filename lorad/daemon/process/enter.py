"""Become another user for good, then a program: `python -I -S enter.py UID GID GROUPS CWD PROGRAM…`. Standard
library only; GROUPS are numbers with commas between them.

It begins with the powers of the daemon and ends without any: no capability, no setuid program that could give
one back (no_new_privs), no other group. CWD is entered as that user; where they may not, `/` is used instead.
Where OWN_SECRETS is in the environment, the program gets the secrets of that user, which are read here with
the user's rights: PLACE has a file for each variable.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITIES_V3 = 0x20080522
_UMASK = 0o077
OWN_SECRETS = "LORAD_OWN_SECRETS"
PLACE = ".config/lorad/secrets"  # in the user's home
UNREADABLE = "lorad: a secret cannot be read: "  # how the message about a bad file begins
_MOST = 256  # files that are looked at


def main() -> None:
    uid, gid, groups, cwd, *argv = sys.argv[1:]
    has_secrets = bool(os.environ.pop(OWN_SECRETS, ""))
    if has_secrets:  # imported now, as the user may not be able to read lorad
        sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "../../..")))
        from lorad.daemon.process.shim import read_secret
    libc = ctypes.CDLL(None, use_errno=True)  # what fails from here on raises OSError, and nothing is started
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    if int(uid) != 0:  # a daemon that is not root itself keeps its capabilities through setresuid
        _checked(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
        nothing = (ctypes.c_uint32 * 6)()
        _checked(libc.capset(header, nothing), "capabilities")
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    os.umask(_UMASK)
    if has_secrets:  # from the files that have names of variables
        path = directory = os.path.join(os.environ.get("HOME", "/"), PLACE)
        try:
            names = sorted(os.listdir(directory))[:_MOST]
            for name in (name for name in names if name.isidentifier() and not name.startswith("LORAD_")):
                path = os.path.join(directory, name)
                os.environ[name] = read_secret(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            sys.exit(f"{UNREADABLE}{path}: {error.strerror}")
    try:
        os.chdir(cwd)
    except OSError:
        os.chdir("/")
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        sys.exit(f"lorad: cannot start {argv} as user {uid}: {error}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
