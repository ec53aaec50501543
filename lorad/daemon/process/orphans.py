"""Find and end processes that a shim started and that outlived their attempt.

They are recognised by LORAD_ATTEMPT in their environment. A process that gives itself another title writes
over that; it is recognised by its stdout or stderr, a log of the attempt.
"""

import contextlib
import os
import pwd
import signal
import time
from pathlib import Path

from lorad.box import config
from lorad.box.paths import AttemptDir, Home
from lorad.children.identity import opened, pids
from lorad.daemon.process.processes import attempts_under, judge, read_status
from lorad.errors import LoradError
from lorad.records.daemon import Orphan

_MARK = b"LORAD_ATTEMPT="
_SETTLED_SECONDS = 60.0  # after an end, what the process left may still be ending
_TERM_SECONDS = 5.0
_COMMAND_LENGTH = 200


def find_orphans(home: Home, settled: float = _SETTLED_SECONDS) -> list[Orphan]:
    """Find the orphans of the home. Only root can see other users' processes.

    An orphan belongs to an attempt that ended more than `settled` seconds before, or whose directory is gone,
    or that was followed by another one.
    """
    roots = _roots_of(home)
    marked = {pid: attempt for pid in pids() if (attempt := _attempt_of(pid, roots)) is not None}
    over = set[AttemptDir]()
    spared = {os.getpid()}
    for attempt in set(marked.values()):
        status = read_status(attempt)
        if status is None:  # gone, or not yet begun; a shim that could not write it down starts nothing
            is_over = not attempt.root.is_dir()
        elif judge(attempt, status).is_over:
            is_over = status["ended_at"] is None or not 0 <= time.time() - status["ended_at"] <= settled
        else:
            newest = max(int(other.root.name) for other in attempts_under(attempt.root.parent.parent))
            is_over = newest > int(attempt.root.name)
        if status is not None:
            spared.add(status["shim_pid"])  # shims end with their children
        if is_over:
            over.add(attempt)
    remaining = {pid: attempt for pid, attempt in marked.items() if attempt in over and pid not in spared}
    orphans = []
    for pid, attempt in sorted(remaining.items()):
        place = Path(f"/proc/{pid}")
        command = user = ""
        with contextlib.suppress(OSError):  # as far as this user may look
            words = place.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            command = words.strip()[:_COMMAND_LENGTH]
            uid = place.stat().st_uid
            user = str(uid)
            user = pwd.getpwuid(uid).pw_name
        orphans.append(Orphan(pid, str(attempt.root), command, user))
    return orphans


def end_orphans(home: Home, settled: float = _SETTLED_SECONDS) -> list[Orphan]:
    """Stop every orphan: SIGTERM, then SIGKILL after _TERM_SECONDS. Return the ones that were signalled."""
    signalled: dict[int, Orphan] = {}
    roots = _roots_of(home)
    for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _TERM_SECONDS)):
        for orphan in find_orphans(home, settled):
            with contextlib.suppress(OSError), opened(orphan.pid) as pidfd:
                if _attempt_of(orphan.pid, roots) is not None:  # else its pid is another process's by now
                    signal.pidfd_send_signal(pidfd, number)
                    signalled[orphan.pid] = orphan
        deadline = time.monotonic() + seconds
        while find_orphans(home, settled) and time.monotonic() < deadline:
            time.sleep(0.1)
    return list(signalled.values())


def _roots_of(home: Home) -> list[Path]:
    """List the directories that hold attempts of the home."""
    storage = None
    with contextlib.suppress(LoradError):
        storage = config.load(home.config).storage
    return [directory.resolve() for directory in (home.root, storage) if directory is not None]


def _attempt_of(pid: int, roots: list[Path]) -> AttemptDir | None:
    """Find the attempt of these homes that started a process; None where none did, or that cannot be read."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        marks = [variable for variable in variables if variable.startswith(_MARK)]
        paths = [Path(os.fsdecode(mark[len(_MARK) :])).resolve() for mark in marks[:1]]
    for fd in ("1", "2") if not paths else ():
        with contextlib.suppress(OSError):
            parents = Path(os.readlink(f"/proc/{pid}/fd/{fd}").removesuffix(" (deleted)")).parents
            paths += [path for path in parents if path.name.isdigit() and path.parent.name == "attempts"][:1]
    named = (path for path in paths if path.parent.name == "attempts")
    return next((AttemptDir(path) for path in named if any(root in path.parents for root in roots)), None)
