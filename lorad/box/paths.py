"""Where everything lies: `LORAD_HOME`, run directories, attempt directories, sockets."""

import contextlib
import errno
import grp
import hashlib
import os
import pwd
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lorad.errors import NotAllowed, StorageError

SOCKET_PATH_LIMIT = 107  # bytes, sun_path of sockaddr_un without its NUL
MEMORY = Path("/dev/shm")
_INSTALLED = Path(__file__).resolve().parents[2]  # where `import lorad` finds it


def checkout() -> Path | None:
    """Return the source tree that lorad runs from; None where it is a wheel, which has no tests."""
    return _INSTALLED if (_INSTALLED / ".ci" / "setup-engines").is_file() else None


def python_path(*others: str | None) -> str:
    """Return a PYTHONPATH in which this lorad comes first, then what others say."""
    entries = [str(_INSTALLED), *(entry for entry in others if entry)]
    return os.pathsep.join(dict.fromkeys(os.pathsep.join(entries).split(os.pathsep)))


def default_home() -> Path:
    """Return `$LORAD_HOME`, else `$XDG_DATA_HOME/lorad`, else `~/.local/share/lorad`.

    Raises StorageError for a user without a home, as containers have them that know only a number.
    """
    home = os.environ.get("LORAD_HOME")
    try:
        if home:
            return Path(home).expanduser().absolute()
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        return Path(data) / "lorad"
    except RuntimeError as error:
        where = f"LORAD_HOME={home}" if home else f"no HOME, and none of user {os.getuid()} in passwd"
        raise StorageError(f"{where}: {error}", hint="Set LORAD_HOME to a directory of your own.") from None


def cache_directory() -> Path:
    """Return `$LORAD_CACHE`, else `$XDG_CACHE_HOME/lorad`, else `~/.cache/lorad`, for what can be made again.

    Raises OSError for a user without a home.
    """
    try:
        if own := os.environ.get("LORAD_CACHE"):
            return Path(own).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorad"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, str(error), "~/.cache") from None


def give_home() -> None:
    """Set HOME to lorad's own home for a user who has none: third parties keep files there, or die."""
    with contextlib.suppress(StorageError):
        try:
            pwd.getpwuid(os.getuid())
        except KeyError:
            if "HOME" not in os.environ:
                os.environ["HOME"] = str(default_home())


def _socket_path(path: Path) -> Path:
    """Return a path, or one in the runtime directory where it is too long for a Unix socket.

    It depends on the path alone, so that every process comes to the same one. Its directory is 0700.
    """
    if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT:
        return path
    return runtime_directory() / (hashlib.sha256(os.fsencode(path)).hexdigest()[:16] + ".sock")


def private_directory(owner: Path) -> Path:
    """Return a 0700 directory of `owner`'s with a short name, for sockets and temporary files.

    The path depends on `owner` alone; the caller makes and removes the directory.
    """
    return runtime_directory() / hashlib.sha256(os.fsencode(owner)).hexdigest()[:12]


def memory_directory(owner: Path) -> Path:
    """Return a directory of `owner`'s in memory, where the machine has such a file system.

    The path depends on `owner` and the user alone; the caller makes and removes the directory.
    """
    return MEMORY / f"lorad-{os.getuid()}-{hashlib.sha256(os.fsencode(owner)).hexdigest()[:16]}"


def runtime_directory() -> Path:
    """Make the user's directory for sockets. Raises PermissionError when somebody else made it first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    directory = Path(runtime) / f"lorad-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise PermissionError(f"{directory} must be a directory that belongs to you and is 0700")
    return directory


def refuse_open(directory: Path, *, shared_place: bool = False) -> None:
    """Raise NotAllowed for a directory where other users could put their files in place of lorad's.

    With `shared_place` a directory with the sticky bit will do, where nobody can replace another's files.
    """
    status = directory.stat()
    mode = status.st_mode
    wrong = ""
    if status.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        wrong = f"belongs to user {status.st_uid}"
    elif mode & (stat.S_IWOTH | stat.S_IWGRP) and not (shared_place and mode & stat.S_ISVTX):
        is_own_group = False  # as many systems make one for each user
        with contextlib.suppress(KeyError):
            group = grp.getgrgid(status.st_gid)
            user = pwd.getpwuid(os.geteuid())
            is_private = group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
            is_own_group = user.pw_gid == group.gr_gid and is_private
        if mode & stat.S_IWOTH or not is_own_group:
            wrong = "may be written to by other users"
    if wrong:
        raise NotAllowed(
            f"{directory} {wrong} (mode {stat.S_IMODE(mode):04o})",
            hint=f"Use a directory of your own in it, as {directory / 'lorad'}; or, if nobody else needs to "
            f"write there, `chmod go-w {directory}`. Its mode was not changed.",
        )


class _Below:
    """A path below `root`; the classes here list theirs, and describe those whose names say too little."""

    def __init__(self, path: str, *, is_socket: bool = False) -> None:
        self._path = path
        self._is_socket = is_socket

    def __get__(self, directory: "AttemptDir | RunDir | Home", _: type) -> Path:
        path = directory.root / self._path
        return _socket_path(path) if self._is_socket else path


@dataclass(frozen=True)
class AttemptDir:
    """Names what the shim of one process life writes and reads: see `lorad/daemon/process/shim.py`."""

    root: Path

    lock = _Below("lock")
    command = _Below("command.json")
    """{argv, env, cwd, run, role, attempt}, written before the shim starts."""
    spec = _Below("spec.json")
    """The resolved spec that a run's attempt goes by."""
    status = _Below("status.json")
    """{shim_pid, pid, start_time, boot_id, exit_code, signal, ended_at, oom_before, oom_after}."""
    log = _Below("log")
    """The process's stdout and stderr."""
    killed = _Below("killed.json")
    """{why, at}, which the daemon writes before it kills the process."""

    @property
    def work(self) -> Path:
        """Return the directory that the process writes to: one of its own where it is another user's."""
        theirs = self.root / "work"
        return theirs if theirs.is_dir() else self.root

    @property
    def heartbeat(self) -> Path:
        """Return the file of `lorad/protocol/heartbeat.py`."""
        return self.work / "heartbeat"


@dataclass(frozen=True)
class RunDir:
    """Names the files of `runs/<name>/`, which are everything that a run is; the journal is the truth."""

    root: Path

    journal = _Below("journal.jsonl")
    spec = _Below("spec.json")
    """The resolved spec; `spec_text` is what the user wrote."""
    spec_text = _Below("spec.yaml")
    versions = _Below("versions")
    checkpoints = _Below("checkpoints")
    samples = _Below("samples")
    evals = _Below("evals")
    """The completions of evaluations."""
    loggers = _Below("loggers")
    """The cursors of experiment loggers, see `lorad/loggers/cursor.py`."""
    tinker = _Below("tinker")
    """What the door and the lane of a tinker client's model write."""
    origin = _Below("origin")
    """Where a fork keeps the checkpoint, or the version, that it begins with."""
    reference = _Below("reference")
    """The adapter that its KL penalty is measured against, where that is not the base."""
    reference_logprobs = _Below("reference_logprobs")
    """Log-probabilities of the data, which a resume reads again."""

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def written(self) -> tuple[Path, ...]:
        """Return every directory that processes of the run write into, but cannot make in a shared home."""
        results = (self.versions, self.checkpoints, self.samples, self.evals)
        return (*results, self.reference_logprobs, self.loggers)

    def version(self, number: int) -> Path:
        return self.versions / f"{number:06d}"

    def checkpoint(self, step: int, attempt: int) -> Path:
        """Return a checkpoint's directory; its name has the attempt, so that a resume never replaces one."""
        return self.checkpoints / f"{step:06d}-a{attempt}"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.root / "attempts" / f"{number:04d}")


@dataclass(frozen=True)
class Home:
    """Names the files of `LORAD_HOME`; a fresh one is a fresh world."""

    root: Path

    database = _Below("lorad.db")
    config = _Below("config.yaml")
    daemon_lock = _Below("daemon.lock")
    daemon_log = _Below("logs/daemon.log")
    journal = _Below("journal.jsonl")
    """The daemon's own facts: runs created and removed, moves."""
    runs = _Below("runs")
    pools = _Below("pools")
    models = _Below("models")
    """The models that `lorad models get` brought, see `lorad/box/models.py`."""
    gateway = _Below("gateway")
    """The gateway's attempts, and `table.json`, what it serves under which name."""
    gateway_port = _Below("gateway/port")
    """The port on 127.0.0.1 that the gateway of one user has chosen."""
    gateway_key = _Below("gateway/key")
    """The key by which that user's clients are let in there."""
    tinker = _Below("tinker")
    """The door for the tinker client: its attempts, keys, and what it knows."""
    notify = _Below("notify")
    """Notifications: `outbox.json`, and the process that delivers them."""
    socket = _Below("lorad.sock", is_socket=True)
    gateway_socket = _Below("gateway.sock", is_socket=True)
    tinker_socket = _Below("tinker.sock", is_socket=True)

    @property
    def shared_by(self) -> int | None:
        """Return the user whose daemon and home this user shares; None in a home of one's own."""
        try:
            owner = self.root.stat().st_uid
        except OSError:
            return None
        return None if os.getuid() in (0, owner) else owner

    def run(self, name: str) -> RunDir:
        return RunDir(self.runs / name)

    def pool(self, pool_id: str) -> Path:
        return self.pools / pool_id

    def pool_socket(self, pool_id: str) -> Path:
        return _socket_path(self.pool(pool_id) / "pool.sock")

    # Each user of a shared daemon has a gateway and a door that run as that user.
    def gateway_of(self, uid: int) -> Path:
        return self.gateway / "owners" / str(uid)

    def gateway_socket_of(self, uid: int) -> Path:
        return self.gateway_of(uid) / "work" / "gateway.sock"

    def tinker_of(self, uid: int) -> Path:
        return self.tinker / "owners" / str(uid)

    def tinker_socket_of(self, uid: int) -> Path:
        return self.tinker_of(uid) / "work" / "tinker.sock"
