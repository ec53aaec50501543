"""Does logging out end the daemon and its runs?

What logind is set to do, and in which part of systemd they live.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PLACES = ("etc", "run", "usr/local/lib", "usr/lib")  # the first goes before the others
YES = ("1", "yes", "y", "true", "t", "on")
INSTALL = (
    "`loginctl enable-linger && lorad daemon install --now`: then systemd looks after the daemon, "
    "logged in or not."
)


class Setting(NamedTuple):
    """where: the file that says so; "" for what logind was built with."""

    value: str
    where: str


def logout_check(user: str, pids: Mapping[str, int], *, uid: int, root: Path = Path("/")) -> dict[str, Any]:
    """{ok, detail, hint} for processes of `user`, by name. root: of the files that are looked at."""
    if not (root / "run/systemd/system").is_dir():
        return {"ok": True, "detail": "no systemd here: a logout ends nothing", "hint": ""}
    kills, is_lingering = kills_processes(root, user), has_linger(root, user)
    places = {name: cgroup_of(root, pid) for name, pid in pids.items()}
    in_session = (
        [name for name, place in places.items() if "/session-" in place] if places else ["what is started"]
    )
    in_manager = [name for name, place in places.items() if f"user@{uid}.service" in place]
    if in_manager and not is_lingering:
        told = f"{listed(in_manager)} with the user's systemd, which stops at the last logout"
        return {
            "ok": False,
            "detail": f"a logout ends {told}",
            "hint": f"`loginctl enable-linger {user}` keeps it up.",
        }
    if in_session and kills is not None:
        told = (
            f"{listed(in_session)}: KillUserProcesses={kills.value} "
            f"({kills.where or 'the default of logind'})"
        )
        return {"ok": False, "detail": f"a logout ends {told}", "hint": INSTALL}
    why = (
        "linger is on"
        if in_manager
        else "KillUserProcesses is off"
        if in_session
        else "no session holds them"
    )
    return {"ok": True, "detail": f"a logout ends nothing: {why}", "hint": ""}


def own_name() -> str:
    """Return the name of this process's user, or the number if the machine knows no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def kills_processes(root: Path, user: str) -> Setting | None:
    """Return why the last logout ends what `user` started in sessions, or None if it does not."""
    settings = read_settings(root)
    # as systemd comes; most distributions turn it off
    kills = settings.get("KillUserProcesses", Setting("yes", ""))
    spared = settings.get("KillExcludeUsers", Setting("root", "")).value.split()
    meant = settings.get("KillOnlyUsers", Setting("", "")).value.split()
    if kills.value.lower() not in YES or user in spared or (meant and user not in meant):
        return None
    return kills


def has_linger(root: Path, user: str) -> bool:
    return (root / "var/lib/systemd/linger" / user).exists()


def read_settings(root: Path) -> dict[str, Setting]:
    """Read the settings in logind.conf and its drop-ins, in order of file name; the last one counts.

    The values commented out in the shipped file are the ones logind was built with.
    """
    found: dict[str, Setting] = {}
    mains = [path for place in PLACES if (path := root / place / "systemd/logind.conf").is_file()][:1]
    for path in mains:
        found |= {name: Setting(value, "") for name, value in assignments(path, commented=True)}
    for path in [*mains, *drop_ins(root)]:
        where = f"/{path.relative_to(root)}"
        found |= {name: Setting(value, where) for name, value in assignments(path)}
    return found


def drop_ins(root: Path) -> list[Path]:
    """Return the drop-ins; one hides those of the same name in later places."""
    found: dict[str, Path] = {}
    for place in reversed(PLACES):
        found |= {path.name: path for path in (root / place / "systemd/logind.conf.d").glob("*.conf")}
    return [found[name] for name in sorted(found) if found[name].is_file()]


def assignments(path: Path, *, commented: bool = False) -> Iterator[tuple[str, str]]:
    for line in path.read_text(errors="replace").splitlines():
        name, equals, value = line.strip().removeprefix("#" if commented else "").partition("=")
        if equals and name.strip().isalpha() and (commented == line.strip().startswith("#")):
            yield name.strip(), value.strip()


def cgroup_of(root: Path, pid: int) -> str:
    """Return the cgroup of a process in systemd's hierarchy, or "" if it cannot be read."""
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next(
        (line.partition("::")[2] or line.rpartition(":")[2] for line in lines if is_systemds(line)), ""
    )


def is_systemds(line: str) -> bool:
    return line.startswith("0::") or ":name=systemd:" in line


def listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
