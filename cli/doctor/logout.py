"""Read from logind's settings, and from where processes live, whether a logout ends the daemon and runs."""

import contextlib
import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from lorad.children.interpreter import InterpreterFinding
from lorad.text import some_of

_PLACES = ("etc", "run", "usr/local/lib", "usr/lib")  # the first goes before the others
_YES = ("1", "yes", "y", "true", "t", "on")
_INSTALL = (
    "`loginctl enable-linger && lorad daemon install --now`: then systemd looks after the daemon, "
    "logged in or not."
)


class _LogoutSetting(NamedTuple):
    """A setting of logind, and the file that says so; "" for what logind was built with."""

    value: str
    where: str


def logout_check(
    user: str, pids: Mapping[str, int], *, uid: int, root: Path = Path("/")
) -> InterpreterFinding:
    """Check processes of `user`, by name. root: directory of the files that are looked at."""
    if not (root / "run/systemd/system").is_dir():
        return InterpreterFinding("logout", True, "no systemd here: a logout ends nothing")
    settings = read_settings(root)
    # as systemd comes; most distributions turn it off
    kills = settings.get("KillUserProcesses", _LogoutSetting("yes", ""))
    spared = settings.get("KillExcludeUsers", _LogoutSetting("root", "")).value.split()
    meant = settings.get("KillOnlyUsers", _LogoutSetting("", "")).value.split()
    is_killing = kills.value.lower() in _YES and user not in spared and (not meant or user in meant)
    is_lingering = has_linger(root, user)
    places = {}  # cgroups in systemd's hierarchy; "" for one that cannot be read
    for name, pid in pids.items():
        lines = list[str]()
        with contextlib.suppress(OSError):
            lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
        systemds = (line for line in lines if line.startswith("0::") or ":name=systemd:" in line)
        places[name] = next((line.partition("::")[2] or line.rpartition(":")[2] for line in systemds), "")
    in_session = (
        [name for name, place in places.items() if "/session-" in place] if places else ["what is started"]
    )
    in_manager = [name for name, place in places.items() if f"user@{uid}.service" in place]
    if in_manager and not is_lingering:
        ended = f"{some_of(in_manager, 3)} with the user's systemd, which stops at the last logout"
        hint = f"`loginctl enable-linger {user}` keeps it up."
        return InterpreterFinding("logout", False, f"a logout ends {ended}", hint)
    if in_session and is_killing:
        set_by = kills.where or "the default of logind"
        ended = f"{some_of(in_session, 3)}: KillUserProcesses={kills.value} ({set_by})"
        return InterpreterFinding("logout", False, f"a logout ends {ended}", _INSTALL)
    why = "KillUserProcesses is off" if in_session else "no session holds them"
    why = "linger is on" if in_manager else why
    return InterpreterFinding("logout", True, f"a logout ends nothing: {why}")


def own_name() -> str:
    """Return the name of this process's user, or the number if the machine knows no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def has_linger(root: Path, user: str) -> bool:
    return (root / "var/lib/systemd/linger" / user).exists()


def read_settings(root: Path) -> dict[str, _LogoutSetting]:
    """Read the settings in logind.conf and its drop-ins, in order of file name; the last one counts.

    The values commented out in the shipped file are the ones logind was built with.
    """
    settings: dict[str, _LogoutSetting] = {}
    mains = [path for place in _PLACES if (path := root / place / "systemd/logind.conf").is_file()][:1]
    for path in mains:
        settings |= {name: _LogoutSetting(value, "") for name, value in _assignments(path, commented=True)}
    drop_ins: dict[str, Path] = {}
    for place in reversed(_PLACES):  # a drop-in hides those of the same name in later places
        drop_ins |= {path.name: path for path in (root / place / "systemd/logind.conf.d").glob("*.conf")}
    for path in [*mains, *(path for _, path in sorted(drop_ins.items()) if path.is_file())]:
        where = f"/{path.relative_to(root)}"
        settings |= {name: _LogoutSetting(value, where) for name, value in _assignments(path)}
    return settings


def _assignments(path: Path, *, commented: bool = False) -> Iterator[tuple[str, str]]:
    for line in path.read_text(errors="replace").splitlines():
        name, equals, value = line.strip().removeprefix("#" if commented else "").partition("=")
        if equals and name.strip().isalpha() and (commented == line.strip().startswith("#")):
            yield name.strip(), value.strip()
