"""A home whose every process is watched from outside: what /proc says, not what lorad says of itself."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lorad.records.runs import RunDetails
from tests.kit.world import REPOSITORY, World

PROBE = Path(__file__).with_name("probe")
MODULES = {
    "lorad.daemon": "daemon",
    "lorad.driver": "driver",
    "lorad.pool": "pool",
    "lorad.gateway": "gateway",
}
# of user code, below a driver: without LORAD_HOME, and gone when it is
HELPERS = {"lorad.envs.child": "env-host", "lorad.driver.user.reward_child": "reward-worker"}
LOOK_SECONDS = 0.1
ORPHAN_SECONDS = 15.0  # a process may outlive that of its attempt for so long


class Process(NamedTuple):
    """what: the last argument, or for a shim its attempt directory. attempt: of its mark, "" without one."""

    pid: int
    parent: int
    role: str
    what: str
    attempt: str
    zombie: bool

    @property
    def run(self) -> str:
        """Return the run of a driver or its shim; "" for other processes."""
        parts = self.what.split("/")
        return parts[-3] if "runs" in parts and "attempts" in parts else ""


class Box(World):
    """violations: what must never be seen.

    The daemon is started again whenever it is gone, unless `resting`.
    """

    def __init__(self, chance: random.Random, *, tell: bool = False) -> None:
        super().__init__()
        self.tell = tell
        self.chance, self.violations = chance, list[str]()
        self.env = os.environ | {"LORAD_HOME": str(self.home.root), "KILL9_ROOT": str(self.root)}
        self.env["PYTHONPATH"] = f"{PROBE}:{REPOSITORY}"
        (self.root / "phases").mkdir()
        self.home.root.mkdir(mode=0o700)
        self.client = self.client.patient(30.0)
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.spare: set[int] = set()  # pids of those of which one must give way
        self.started = 0
        self.last: dict[str, RunDetails] = {}  # the last answer about each run
        self.resting = self.closed = False
        self._late: dict[tuple[int, str], float] = {}
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._keep_daemon, self._look)
        ]

    def open(self) -> None:
        for thread in self._threads:
            thread.start()

    def shut(self) -> None:
        """No more threads; nothing is started any more."""
        self.closed = True
        for thread in self._threads:
            thread.join()

    def wrong(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)
            print(f"  WRONG: {what}", flush=True)

    def say(self, what: str) -> None:
        if self.tell:
            print(f"  {what}", flush=True)

    # -- the daemon ------------------------------------------------------------------------------------------
    def start_daemon(self) -> None:
        with open(self.root / "daemon.out", "ab") as out:
            command = [sys.executable, "-m", "lorad.daemon"]
            started = subprocess.Popen(
                command, env=self.env, cwd="/", stdout=out, stderr=out, start_new_session=True
            )
        self.daemons.append(started)
        self.started += 1

    def _keep_daemon(self) -> None:
        """What a service manager does; now and then two are started at once, of which one must give way."""
        while not self.closed:
            time.sleep(0.02)
            self._reap()
            if not self.daemons and not self.resting:
                time.sleep(self.chance.uniform(0.0, 0.4))
                self.start_daemon()
                if self.chance.random() < 0.15:
                    self.start_daemon()
                    self.spare |= {daemon.pid for daemon in self.daemons}

    def _reap(self) -> None:
        """Check that no daemon ended by itself, unless it was killed, asked to end, or one too many."""
        for daemon in self.daemons[:]:
            if (code := daemon.poll()) is None:
                continue
            self.daemons.remove(daemon)
            if code not in (-signal.SIGKILL, 0) and (daemon.pid not in self.spare or code != 1):
                said = (self.root / "daemon.out").read_text(errors="replace")[-1500:]
                self.wrong(f"the daemon ended by itself with {code}: {said}")

    # -- processes -------------------------------------------------------------------------------------------
    def processes(self) -> list[Process]:
        """List the processes of this home that have not ended."""
        found = [
            process for pid in os.listdir("/proc") if pid.isdigit() and (process := self._read(int(pid)))
        ]
        return [process for process in found if not process.zombie]

    def _read(self, pid: int) -> Process | None:
        place = f"/proc/{pid}"
        try:
            environment = Path(place, "environ").read_bytes()
            argv = Path(place, "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            fields = Path(place, "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        here = str(self.home.root)
        if f"LORAD_HOME={here}\0".encode() not in environment and not any(here in text for text in argv):
            return None
        marks = [
            text[14:]
            for text in environment.decode(errors="replace").split("\0")
            if text[:14] == "LORAD_ATTEMPT="
        ]
        role, what = role_of(argv)
        return Process(pid, int(fields[1]), role, what, "".join(marks[:1]), fields[0] in (b"Z", b"X"))

    def helpers(self, run: str) -> list[Process]:
        """List the processes of user code of a run."""
        drivers = {p.pid for p in self.processes() if p.role == "driver" and p.run == run}
        found, below = [], drivers
        while below:
            children = [read for pid in below for read in _children(pid)]
            below = {pid for pid, _ in children}
            found += [
                Process(pid, 0, HELPERS[argv[argv.index("-m") + 1]], "", "", False)
                for pid, argv in children
                if "guard.py" not in " ".join(argv) and "-m" in argv and argv[argv.index("-m") + 1] in HELPERS
            ]
        return found

    def _look(self) -> None:
        while not self.closed:
            with contextlib.suppress(OSError):
                self.look(self.processes())
            time.sleep(LOOK_SECONDS)

    def look(self, processes: list[Process]) -> None:
        """No attempt lives twice, no run has two drivers, nothing outlives what it was started for."""
        parents = {process.pid: process for process in processes}
        mains = [p for p in processes if p.role in ("driver", "pool") and not is_copy(p, parents)]
        for one in mains:
            for other in mains:
                if (
                    one.pid < other.pid
                    and one.role == other.role
                    and (one.run or one.what) == (other.run or other.what)
                ):
                    self._doubled(one, other)
        self._orphans([p for p in processes if p.attempt and p not in mains], {p.pid for p in mains})

    def _doubled(self, one: Process, other: Process) -> None:
        """Unless one of them went just now."""
        if all(self._read(process.pid) == process for process in (one, other, one, other)):
            self.wrong(f"two {one.role}s at once: {one} and {other}")

    def _orphans(self, marked: list[Process], mains: set[int]) -> None:
        alive = {}
        for process in marked:
            if main_of(process.attempt) not in mains and "gateway" not in process.attempt:
                since = self._late.get((process.pid, process.attempt), time.monotonic())
                alive[process.pid, process.attempt] = since
                if time.monotonic() - since > ORPHAN_SECONDS:
                    self.wrong(f"an orphan for {ORPHAN_SECONDS:.0f} s: {process}")
        self._late = alive

    def starts(self) -> Iterator[tuple[str, int]]:
        """Attempt directories of drivers and pools, and how often a process began there."""
        path = self.root / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        for attempt in sorted({line.split()[1] for line in lines}):
            yield attempt, sum(line.split()[1] == attempt for line in lines)

    def phase(self, run: str) -> str:
        """Return the phase of the run's driver, as the probe wrote it; "" when none lives."""
        try:
            pid, phase = (self.root / "phases" / run).read_text().split()
            os.kill(int(pid), 0)
        except (OSError, ValueError):
            return ""
        return phase


def role_of(argv: list[str]) -> tuple[str, str]:
    if "-m" in argv[:-1]:
        return MODULES.get(argv[argv.index("-m") + 1], ""), argv[-1]
    shims = [argv[n + 1] for n, text in enumerate(argv[:-1]) if text.endswith("/shim.py")]
    if shims:
        return (
            "driver-shim" if "/runs/" in shims[0] else "pool-shim" if "/pools/" in shims[0] else "shim"
        ), shims[0]
    return "", ""


def _children(pid: int) -> list[tuple[int, list[str]]]:
    """Return the children of a process, with their command lines."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                argv = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                found.append((int(child), argv))
    return found


def is_copy(process: Process, parents: dict[int, Process]) -> bool:
    """A child between fork and exec looks like its parent."""
    parent = parents.get(process.parent)
    return parent is not None and (parent.role, parent.what) == (process.role, process.what)


def main_of(attempt: str) -> int | None:
    """The pid that the shim wrote down."""
    try:
        pid: int | None = json.loads(Path(attempt, "status.json").read_bytes())["pid"]
    except (OSError, ValueError, KeyError):
        return None
    return pid
