"""Look up the user of a uid, their environment, and the command that runs a process as them."""

import os
import pwd
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from lorad.box.proxies import past_proxies
from lorad.daemon.process import enter
from lorad.protocol.listener import DAEMON_UID

_NOBODYS_GROUP = 65534  # for a uid without a name: the group of its number may be another user's
_REMEMBERED = 60.0  # seconds
_INHERITED = re.compile(r"PATH|LANG|LC_\w+|TZ|CUDA_VISIBLE_DEVICES|NVIDIA_\w+")
_ENTER = (sys.executable, "-I", "-S", str(Path(enter.__file__)))


@dataclass(frozen=True)
class User:
    """A user of the machine.

    environment: the variables of their processes, apart from those that lorad adds.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, argv: Sequence[str], cwd: Path) -> list[str]:
        """Make the command that runs `argv` as this user, in `cwd` if they may enter it, else in `/`."""
        groups = ",".join(map(str, self.groups))
        return [*_ENTER, str(self.uid), str(self.gid), groups, str(cwd), *argv]


def user_of(uid: int, allowed: Sequence[str] = ()) -> User:
    """Look a user up, as they would log in now. Answers are reused for a while: a network directory may be
    slow.

    allowed: further variables of this process that the user's processes inherit.
    """
    return _looked_up(uid, tuple(allowed), int(time.monotonic() / _REMEMBERED))


@lru_cache(maxsize=1024)
def _looked_up(uid: int, allowed: tuple[str, ...], _: int) -> User:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        name = str(uid)
        gid = _NOBODYS_GROUP
        home = "/"
        groups = [_NOBODYS_GROUP]
    else:
        name = entry.pw_name
        gid = entry.pw_gid
        home = entry.pw_dir
        groups = os.getgrouplist(name, gid)
    inherited = {
        key: value for key, value in os.environ.items() if _INHERITED.fullmatch(key) or key in allowed
    }
    environment = inherited | {"HOME": home, "USER": name, "LOGNAME": name, DAEMON_UID: str(os.geteuid())}
    return User(uid, gid, tuple(groups), name, home, environment | past_proxies(environment))


class Caller(NamedTuple):
    """The user who sends a request."""

    uid: int
    name: str
