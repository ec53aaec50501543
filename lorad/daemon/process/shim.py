"""Start one process and write down how it ended: `python -I -S shim.py ATTEMPT_DIR`. Standard library only.

The shim outlives the daemon. It holds a file lock on the attempt directory, which the child inherits, so that
the lock is held while either lives; it writes `status.json` before the child's first instruction and its end
into the same bytes, so that a full disk does not lose it. A directory is used once: a second shim starts
nothing.

`command.json` is {argv, env, cwd, locks, lock_seconds, kept, secret_files}: `env` is added to the shim's own
environment (null removes a name), of which `kept` names what stays (else all does); `secret_files` are files
that hold the values of further variables; `locks` are files whose locks the child holds for its life, waited
for up to `lock_seconds`; by the time that `status.json` has its end they are free, unless a process that the
child left behind lives.
LORAD_ATTEMPT in the environment of the child, and of whatever it starts, names the attempt directory: see
`orphans.py`. The shim itself exits with one of the codes EX_* below.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
import time

_TYPE_CHECKING = False
if _TYPE_CHECKING:  # typing itself would double the start-up
    from typing import Any

EX_LOCKED = 75  # another shim or its child has the directory, or a lock of `locks` is taken
EX_USED = 76  # the directory had its life
_EX_BROKEN = 77  # no command, or no room for the status
EX_EXEC = 127  # the child's program could not be executed; this is the child's exit code
_SECRET_BYTES = 1 << 16
STATUS_BYTES = 512  # allocated at once, overwritten in place at the end
_FORWARDED = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    root = sys.argv[1]
    # whatever the daemon was started with: none of it is for the child
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    try:  # noqa: SIM105
        os.setsid()
    except PermissionError:
        pass  # the leader of a group already, with a session of its own
    if _take_lock(os.path.join(root, "lock")) is None:
        return EX_LOCKED
    if os.path.exists(os.path.join(root, "status.json")):
        return EX_USED
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(os.path.join(root, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, target)
    for fd in (null, out):
        if fd > 2:
            os.close(fd)
    try:
        with open(os.path.join(root, "command.json")) as file:
            command = json.load(file)
        command["env"] = {**command.get("env", {}), "LORAD_ATTEMPT": os.path.abspath(root)}
        locks = []
        for path in command.get("locks", []):
            if (lock := _take_lock(path, command.get("lock_seconds", 0))) is None:
                os.close(_write_status(root, never_began(locked=True)))
                return EX_LOCKED
            locks.append(lock)
        return _live(root, command, locks)
    except (OSError, ValueError) as error:
        print(f"lorad: {root}: nothing was started: {error}", file=sys.stderr)
        return _EX_BROKEN


def _live(root: str, command: dict[str, Any], locks: list[int]) -> int:
    """Run the child from its start to its end.

    It waits for its status to be on disk before it becomes the program. locks: files to let go of at its end.
    """
    end_the_rest = None
    if command.get("ends_all"):  # it becomes the parent of every orphaned descendant, and kills them all
        sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "../../..")))
        from lorad.children import guard

        guard.prctl(guard.PR_SET_CHILD_SUBREAPER, 1)
        end_the_rest = guard.end_the_rest
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    gate, opened = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(opened)
        _become(command, gate)
    _forward_signals(child)
    os.close(gate)
    status = born(child)
    since = time.clock_gettime(time.CLOCK_BOOTTIME)
    fd = _write_status(root, status)
    try:  # noqa: SIM105
        os.write(opened, b"!")
    except BrokenPipeError:
        pass  # a signal ended the child before its program began
    os.close(opened)
    code = wait(child)
    if end_the_rest is not None:
        end_the_rest()
    for lock in locks:
        os.close(lock)
    status.update(died(code, time.clock_gettime(time.CLOCK_BOOTTIME) - since))
    overwrite(fd, status)
    return 0


def _become(command: dict[str, Any], gate: int) -> None:
    """Become the program, after the byte of the gate: a session of its own, clean signals, then exec."""
    try:
        os.setsid()
        for number in (*_FORWARDED, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        if os.read(gate, 1):
            os.close(gate)
            added = command.get("env", {})
            kept = command.get("kept", os.environ)
            inherited = {name: value for name, value in os.environ.items() if name in kept}
            env = {k: v for k, v in {**inherited, **added}.items() if v is not None}
            env.update({name: read_secret(path) for name, path in command.get("secret_files", {}).items()})
            os.chdir(command.get("cwd") or "/")
            os.execvpe(command["argv"][0], command["argv"], env)
    except BaseException as error:
        os.write(2, f"lorad: cannot start {command.get('argv')}: {error}\n".encode())
    finally:
        os._exit(EX_EXEC)


def read_secret(path: str) -> str:
    """Read a file that only this user can read, without white space around it. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_mode & 0o170000 != 0o100000:
            raise OSError(errno.EINVAL, "not a file", path)
        if status.st_mode & 0o077 or status.st_uid != os.getuid():
            raise OSError(errno.EACCES, "others than its owner may read it, or it is another user's", path)
        data = os.read(fd, _SECRET_BYTES + 1).strip()
    finally:
        os.close(fd)
    if not data or b"\0" in data or len(data) > _SECRET_BYTES:
        raise OSError(errno.EINVAL, "empty, too long, or not a text", path)
    return os.fsdecode(data)


def wait(child: int) -> int:
    """Wait for the child. What is left of its process group is killed while its pid cannot be used again."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != child:
        os.waitpid(ended.si_pid, 0)  # an orphan
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:  # noqa: SIM105 - contextlib would double the start-up
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    return os.waitpid(child, 0)[1]


def _take_lock(path: str, patience: float = 0) -> int | None:
    """Lock `path` for this process and its child, and open it; None when somebody has it for that long."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    os.set_inheritable(fd, True)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
    os.close(fd)
    print(f"lorad: {path} is locked by another process", file=sys.stderr)
    return None


def _forward_signals(child: int) -> None:
    def forward(number: int, _: object) -> None:
        try:  # noqa: SIM105
            os.kill(child, number)
        except ProcessLookupError:
            pass

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)


def born(child: int) -> dict[str, Any]:
    """Make the status of a child that has just been started by this process."""
    me = os.getpid()
    return {
        "shim_pid": me,
        "shim_start_time": start_time(me),
        "pid": child,
        "start_time": start_time(child),
        "boot_id": boot_id(),
        "started_at": time.time(),
        "exit_code": None,
        "signal": None,
        "ended_at": None,
        "oom_before": oom_kills(),
        "oom_after": None,
    }


def never_began(*, locked: bool = False) -> dict[str, Any]:
    """Make the status of an attempt whose child was never started.

    locked: somebody else has one of its locks.
    """
    never = dict.fromkeys(("shim_pid", "shim_start_time", "pid", "start_time", "exit_code", "signal"))
    return {**never, "boot_id": "", "ended_at": time.time(), "locked": locked}


def died(code: int, lived: float) -> dict[str, Any]:
    """Describe the end of a child by its wait status. lived: seconds, by a clock that nobody sets."""
    exited = os.WIFEXITED(code)
    return {
        "exit_code": os.WEXITSTATUS(code) if exited else None,
        "signal": None if exited else os.WTERMSIG(code),
        "ended_at": time.time(),
        "lived": lived,
        "oom_after": oom_kills(),
    }


def oom_kills() -> int | None:
    """Read how many processes this kernel has killed for want of memory; None where it does not count."""
    try:
        with open("/proc/vmstat", "rb") as file:
            return int(file.read().partition(b"\noom_kill ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return None


def start_time(pid: int) -> int:
    """Read the clock ticks from boot to a process's start: field 22 of /proc/PID/stat.

    The rest of lorad reads it by `lorad.children.identity`. The shim cannot: it runs with nothing but the
    standard library in reach, so that it starts in milliseconds.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def padded(status: dict[str, Any]) -> bytes:
    return json.dumps(status).encode().ljust(STATUS_BYTES - 1) + b"\n"


def _write_status(root: str, status: dict[str, Any]) -> int:
    """Put `status.json` in place, whole and on disk; returns its open file for `overwrite`."""
    path = os.path.join(root, "status.json")
    fd = os.open(f"{path}.tmp", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.set_inheritable(fd, False)
    if os.write(fd, padded(status)) != STATUS_BYTES:
        raise OSError(f"no room for {path}")
    os.fsync(fd)
    os.rename(f"{path}.tmp", path)
    directory = os.open(root, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    return fd


def overwrite(fd: int, status: dict[str, Any]) -> None:
    os.pwrite(fd, padded(status), 0)
    os.fsync(fd)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
