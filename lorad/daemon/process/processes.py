"""The processes that the daemon starts through shims, adopts from an earlier daemon, and signals safely.

A process is known by its `Identity`, never by its pid alone.
"""

import contextlib
import fcntl
import json
import os
import re
import signal as signals
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from lorad.box.paths import AttemptDir
from lorad.children.identity import Identity, boot_id, pids
from lorad.children.logs import SURVIVED
from lorad.daemon.process import shim
from lorad.daemon.process.commands import Commands
from lorad.daemon.process.pulse import Pulse
from lorad.daemon.process.users import User
from lorad.files import write_whole

SHIM = [sys.executable, "-I", "-S", str(Path(shim.__file__))]
# a line of a logger, or of a driver after a step
_HEALTHY = re.compile(r"\S+ \S+ (?:INFO|DEBUG) |step \d+/\d+  ")
_ERROR = re.compile(r"(?i)(?:error|exception)\b|\b(?:fatal|critical|aborted|panic)\b")
_SEEN_SECONDS = 2.0
DAMAGED = (
    "It is judged by its lock until its process ends; then nobody knows its exit code. Is the disk in order?"
)
_seen: dict[Path, tuple[float, dict[str, Any] | None]] = {}  # attempts whose status cannot be read


@dataclass(frozen=True)
class ProcessState:
    """What is known of one life of a process.

    phase: `absent` (never started), `starting` (its shim is at work), `alive`, `exited` (exit_code or signal
        is known), or `vanished` (it is gone, or can never start; its exit is unknown).
    trouble: why its status cannot be read; the phase is then what the lock of its directory and /proc show.
    """

    phase: Literal["absent", "starting", "alive", "exited", "vanished"]
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    trouble: str = ""

    @property
    def is_up(self) -> bool:
        return self.phase in ("starting", "alive")

    @property
    def is_over(self) -> bool:
        return self.phase in ("exited", "vanished")

    def in_words(self) -> str:
        """Say how it ended: "exited with code 1", "was killed by SIGKILL"."""
        if self.signal is not None:
            return f"was killed by {signals.Signals(self.signal).name}"
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        if self.phase == "vanished" and self.trouble:
            return f"ended, and nobody knows how: {self.trouble}"
        return "vanished without an exit code" if self.phase == "vanished" else f"is {self.phase}"


class Processes:
    """Starts, inspects and signals processes by their attempt directories.

    signalled: the signal that an attempt was last sent, and when.
    pulses: the heartbeats of attempts, see `health.py`.
    doing: what active runs are doing, in words, by their names.
    put_down: attempts that hang and are being killed.
    looked_at: the monotonic time of the last look at all pulses.
    """

    def __init__(self, commands: Commands | None = None) -> None:
        self.commands = commands or Commands()
        self.signalled: dict[Path, tuple[int, float]] = {}
        self.pulses: dict[AttemptDir, Pulse] = {}
        self.doing: dict[str, str] = {}
        self.put_down: set[AttemptDir] = set()
        self.looked_at = 0.0
        self._shims: dict[Path, int] = {}  # the pid of each shim that this daemon started, 0 once it is over

    def in_words(self, attempt: AttemptDir) -> str:
        """Say what a process is doing, by its own words; "" where it says nothing."""
        pulse = self.pulses.get(attempt)
        return "" if pulse is None else pulse.activity.in_words(time.monotonic())

    def start(
        self,
        attempt: AttemptDir,
        argv: Sequence[str],
        env: Mapping[str, str | None],
        cwd: Path,
        *,
        locks: Sequence[Path] = (),
        about: Mapping[str, Any] | None = None,
        user: User | None = None,
    ) -> None:
        """Start a process in a fresh attempt directory; `inspect` finds out what becomes of it.

        env: what is added to the daemon's environment; None removes a name.
        locks: files that the process holds locked for its life.
        about: further entries of `command.json`.
        user: whose process it is to be, with nothing of the daemon's environment; the directory was made for
            them.

        Raises OSError when the shim cannot be started.
        """
        attempt.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "locks": [*map(str, locks)]}
        if user is not None:
            # variables that stay as they are are only named, as a value may be a secret
            kept = [key for key, value in user.environment.items() if os.environ.get(key) == value]
            own = {key: value for key, value in user.environment.items() if key not in kept}
            command |= {"argv": user.command(argv, cwd), "env": {**own, **env}, "cwd": "/", "kept": kept}
        write_json(attempt.command, command | dict(about or {}), durable=False)
        self._shims[attempt.root] = self.start_shim(attempt.root)

    def inspect(self, attempt: AttemptDir) -> ProcessState:
        """Find out what became of the process of `attempt`.

        Once this daemon's shim for it failed, nothing ever starts there.
        """
        is_own = attempt.root in self._shims
        shim_lives = self._shim_lives(attempt)
        status, trouble = _look_at_status(attempt)
        if trouble:
            is_there = status is not None or shim_lives or is_locked(attempt)
            return ProcessState(
                "alive" if is_there else "vanished", status["pid"] if status else None, trouble=trouble
            )
        if status is None:
            if shim_lives or is_locked(attempt):
                return ProcessState("starting")
            if not is_own:
                return ProcessState("absent")
            condemn(attempt)
            status = read_status(attempt)
        return ProcessState("starting") if status is None else judge(attempt, status)

    def signal(self, attempt: AttemptDir, number: int) -> bool:
        """Send a signal to the process; False when it is not there. A reused pid is never touched."""
        status = read_status(attempt)
        if status is None or status["ended_at"] is not None:
            return False
        return child_of(status).signal(number)

    def kill_group(self, attempt: AttemptDir) -> bool:
        """Send SIGKILL to the process and its group; its shim records the end. False when it is gone."""
        status = read_status(attempt)
        if status is None or not child_of(status).is_alive:
            return False
        try:
            os.killpg(status["pid"], signals.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def watch(self, attempt: AttemptDir) -> int | None:
        """Open a pidfd that becomes readable when the shim is gone, which has recorded the end by then; the
        caller closes it.
        """
        status = read_status(attempt)
        pid = self._shims.get(attempt.root) or (status["shim_pid"] if status else 0)
        if not pid:
            return None
        try:
            return os.pidfd_open(pid)
        except OSError:
            return None

    def collect(self) -> None:
        """Let the shims that are over leave the process table."""
        for root in [root for root, pid in self._shims.items() if pid]:
            self._shim_lives(AttemptDir(root))

    def start_shim(self, root: Path) -> int:
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        return os.posix_spawn(SHIM[0], [*SHIM, str(root)], os.environ, file_actions=quiet, setsid=True)

    def has_ended(self, root: Path, pid: int) -> bool:
        return os.waitpid(pid, os.WNOHANG)[0] != 0

    def _shim_lives(self, attempt: AttemptDir) -> bool:
        pid = self._shims.get(attempt.root, 0)
        if pid and self.has_ended(attempt.root, pid):
            self._shims[attempt.root] = pid = 0
        return pid > 0


def judge(attempt: AttemptDir, status: dict[str, Any]) -> ProcessState:
    """Decide by its status what became of a process."""
    pid = status["pid"]
    if status["ended_at"] is None:
        if child_of(status).is_alive or shim_of(status).is_alive:
            return ProcessState("alive", pid)
        status = read_status(attempt) or status  # its shim may have written the end just now
    is_recorded = pid is not None and status["ended_at"] is not None
    phase: Literal["exited", "vanished"] = "exited" if is_recorded else "vanished"
    return ProcessState(phase, pid, status["exit_code"], status["signal"])


def is_locked(attempt: AttemptDir) -> bool:
    """Check whether the shim or the process lives. A lock that cannot be read counts: nothing is deleted."""
    try:
        with open(attempt.lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # BlockingIOError among them
        return True
    return False


def condemn(attempt: AttemptDir) -> None:
    """Make sure that no process ever begins in an attempt directory; nothing happens where one has begun."""
    attempt.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(attempt.lock, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if not attempt.status.exists():
            write_json(attempt.status, shim.never_began())


class _Status(Struct):
    """The content of `status.json`, see `shim.py`; an attempt that never began has not all of the keys."""

    shim_pid: int | None
    shim_start_time: int | None
    pid: int | None
    start_time: int | None
    boot_id: str
    exit_code: int | None
    signal: int | None
    ended_at: float | None
    started_at: float | None = None
    lived: float | None = None
    oom_before: int | None = None
    oom_after: int | None = None
    locked: bool = False


def read_status(attempt: AttemptDir) -> dict[str, Any] | None:
    """Read the status that the shim wrote, or what /proc shows of a living shim; None without either."""
    return _look_at_status(attempt)[0]


def _look_at_status(attempt: AttemptDir) -> tuple[dict[str, Any] | None, str]:
    """Do `read_status`, and say why the file cannot be read; "" when it can, or there is none.

    Looking through /proc takes milliseconds, so what it shows is kept for a moment.
    """
    trouble = ""
    for _ in range(3):  # the shim may be overwriting it right now
        try:
            data = attempt.status.read_bytes()
            return msgspec.to_builtins(msgspec.json.decode(data, type=_Status)), ""
        except FileNotFoundError:
            return None, ""
        except (msgspec.MsgspecError, UnicodeDecodeError):
            trouble = f"{attempt.status} is damaged"
            time.sleep(0.001)
        except OSError as error:
            trouble = f"{attempt.status} cannot be read: {error.strerror}"
            break
    looked_at, status = _seen.get(attempt.root, (float("-inf"), None))
    is_stale = time.monotonic() - looked_at > _SEEN_SECONDS
    if is_stale or (status is not None and not child_of(status).is_alive):
        status = _look_in_proc(attempt)
        _seen[attempt.root] = time.monotonic(), status
    return status, trouble


def _look_in_proc(attempt: AttemptDir) -> dict[str, Any] | None:
    """Find a living shim of the attempt among all processes, and return the status that it would write."""
    command = [part.encode() for part in (*SHIM[1:], str(attempt.root))]
    for pid in pids():
        with contextlib.suppress(OSError, ValueError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:-1] != command:
                continue
            if os.stat(f"/proc/{pid}").st_uid != os.getuid():  # anybody may call a process so
                continue
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in map(int, children):
                if os.getsid(child) == child:  # orphans that the shim adopted lead no session, or came later
                    status = dict.fromkeys(_Status.__struct_fields__) | {"locked": False}
                    status |= {"shim_pid": pid, "shim_start_time": Identity.of(pid).start}
                    status |= {"pid": child, "start_time": Identity.of(child).start}
                    return status | {"boot_id": boot_id()}
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Read a small JSON file that holds an object; {} when there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def child_of(status: dict[str, Any]) -> Identity:
    """Name the process that a status describes; one that never lives where none was ever started."""
    return Identity(status["boot_id"], status["pid"] or 0, status["start_time"] or 0)


def shim_of(status: dict[str, Any]) -> Identity:
    """Name the shim of the process that a status describes, likewise."""
    return Identity(status["boot_id"], status["shim_pid"] or 0, status["shim_start_time"] or 0)


def attempts_under(parent: Path) -> Iterator[AttemptDir]:
    """Yield the attempt directories of a run or pool directory, oldest first."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(parent / "attempts")):
            if name.isdigit():
                yield AttemptDir(parent / "attempts" / name)


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    """Put a small JSON file in place as a whole.

    durable: it is on disk when this returns; what only a process of this boot reads need not be.
    """
    write_whole(path, json.dumps(data).encode(), durable=durable)


def log_end(path: Path, lines: int = 1) -> str:
    """Quote from a log why its process ended: the last lines down to the last error, without those of a
    healthy process. Where there is no error, say so, and quote the last line; "" for an empty log.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    printed = [line for line in text.splitlines() if line.strip()]
    unwell = [line for line in printed if not _HEALTHY.match(line)]
    has_trace = any(line.startswith("Traceback (") for line in unwell)
    errors = [
        place
        for place, (before, line) in enumerate(pairwise(["", *unwell]))
        if (_ERROR.search(line) and not SURVIVED.search(line))
        or (has_trace and before[:1].isspace() and not line[0].isspace())
    ]
    if errors:
        until = errors[-1] + 1
        shown = [line.strip() for line in unwell[max(until - lines, 0) : until]]
        return "its log ends:" + ("\n" if lines > 1 else " ") + "\n".join(shown)
    return f"it left no error, and its last line was: {printed[-1].strip()}" if printed else ""
