"""Check what a daemon for several users needs: powers, a home that others may pass through, and a lorad that
everybody may run.
"""

import os
import stat
import sys
from pathlib import Path

from lorad.box.paths import SOCKET_PATH_LIMIT, Home
from lorad.daemon.process.user_files import passable
from lorad.errors import NotAllowed

_POWERS = {
    0: "CAP_CHOWN",
    1: "CAP_DAC_OVERRIDE",
    3: "CAP_FOWNER",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
}
_UMASK = 0o077


def prepare_shared(home: Home) -> None:
    """Make the home fit for several users.

    Raises NotAllowed when this process cannot serve other users from there, or their processes cannot reach
    the interpreter or lorad.
    """
    _refuse_powerless()
    for path in (Path(sys.executable), Path(sys.base_prefix), Path(__file__)):
        for place in (path.absolute(), path.resolve()):
            if (closed := closed_part(place)) is not None:
                mode = stat.S_IMODE(closed.stat().st_mode)
                raise NotAllowed(
                    f"other users cannot run {path}: {closed} is closed to them ({mode:04o})",
                    hint="Install lorad where everybody may read it: `python3 -m venv /opt/lorad`, with a "
                    "python that lies outside of anybody's home, then `/opt/lorad/bin/pip install lorad`.",
                )
    os.umask(_UMASK)
    if not home.root.exists():
        passable(home.root)
    for place in (home.root, *home.root.parents):
        status = place.stat()
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()) or others_write:
            problem = f"{place} belongs to somebody who is not the daemon, or may be changed by others"
            raise NotAllowed(problem, hint="Set LORAD_HOME to a directory of root's, as /var/lib/lorad.")
        if not status.st_mode & stat.S_IXOTH:
            raise NotAllowed(
                f"other users cannot get to {home.root}: {place} is closed to them",
                hint=f"`chmod 711 {place}` lets them pass and see nothing; or set LORAD_HOME to a directory "
                "that everybody may reach, as /var/lib/lorad.",
            )
    longest = home.root / "pools" / f"{'x' * 32}-1000" / "work" / "pool.sock"
    if len(os.fsencode(longest)) > SOCKET_PATH_LIMIT:
        hint = "Set LORAD_HOME to a shorter one."
        raise NotAllowed(f"{home.root} is too long a path for sockets", hint=hint)
    passable(home.runs, home.pools, home.gateway)
    home.daemon_log.parent.mkdir(exist_ok=True, mode=0o700)
    home.daemon_log.parent.chmod(0o700)
    # what a daemon of one user may have left readable behind its closed home
    for path in (*home.root.glob(f"{home.database.name}*"), home.journal, home.config):
        if path.exists():
            path.chmod(0o600)


def _refuse_powerless() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    lacking = [name for bit, name in _POWERS.items() if not effective >> bit & 1]
    if not lacking:
        return
    if os.geteuid() == 0:
        options = " --cap-add ".join(lacking)
        hint = f"Root without them is that of a container: start that with --cap-add {options}."
    else:
        service = f"a service user of systemd with\n  AmbientCapabilities={' '.join(_POWERS.values())}\n"
        alone = "Without --system, every user has a daemon of their own, which needs none of that."
        hint = f"Run it as root, or as {service}{alone}"
    raise NotAllowed(f"a shared daemon lacks {', '.join(lacking)}", hint=hint)


def closed_part(path: Path) -> Path | None:
    """Find the first part of `path` that others may not pass or, if it is a file, not read."""
    for place in (*reversed(path.parents), path):
        needed = stat.S_IROTH if place.is_file() else stat.S_IXOTH
        if not place.stat().st_mode & needed:
            return place
    return None
