"""The life of one child process, which ends with the pool that started it, whatever dies first."""

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from lorad.box.paths import AttemptDir
from lorad.children import guard
from lorad.children.logs import SURVIVED, Log
from lorad.children.stacks import dump
from lorad.errors import PoolLost
from lorad.files import write_whole

KILL_SECONDS = guard.LINGER_SECONDS + guard.KILL_SECONDS + 4.0  # the guard's own, and some for a busy machine
_SESSION, _FLAGS, _STARTED = 3, 6, 19  # of guard.read_stat; started: clock ticks after boot
_PF_EXITING = 0x4  # the kernel has closed a process's files, or is about to, and it is no zombie yet
_FAULT = re.compile(r"^(?>.*?(?:Error|Exception)\b).*:|[Oo]ut of memory|error: ", re.MULTILINE)
_NOISE = re.compile(r"nanobind:|^ - leaked|resource_tracker|Ignore import error|Warning")


class Life(msgspec.Struct, frozen=True):
    """What a record holds: enough to end this life later, and to know that a pid was given to another process
    since.
    """

    guard_pid: int
    start_time: int
    boot_id: str
    log: str


class Child:
    """One child process and whatever it starts, under a guard (`guard.py`) that outlives the pool.

    env: added to the pool's own. log: of this child alone, since a process that writes its stdout or stderr
    there is known by that; appended to, mode 0600. record: for `sweep`, there while the process lives. The
    child's umask is 077; it inherits stdout and stderr, and /dev/null as stdin, and nothing else.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, record: Path, cwd: Path
    ) -> None:
        self.argv, self.env, self.log, self.record, self.cwd = list(argv), dict(env), log, record, cwd
        self.pid: int | None = None
        self._log = Log(log)
        self._pidfd = -1  # the guard's
        self._end: asyncio.Task[str] | None = None

    async def start(self) -> None:
        """Start the child; call it once. A program that cannot be executed shows in its end and its log.

        Raises OSError (log, record, cwd) and PoolLost; then, or when it is cancelled, the guard ends what it
        started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = self._spawn(theirs.fileno())
            self._end = asyncio.create_task(self._watch(process, ours))
            self._write_record(process.pid)
            ours.setblocking(False)
            said = await asyncio.get_running_loop().sock_recv(ours, 64)
            if not said:
                raise PoolLost(f"the guard of {self.argv[0]} {await self.ended()}", hint=f"See {self.log}.")
            self.pid = int(said)
        except BaseException:
            ours.close()  # the guard ends what it started
            raise

    @property
    def is_alive(self) -> bool:
        return self._end is not None and not self._end.done()

    async def ended(self) -> str:
        """Wait until nothing of the child is left; returns how it ended: "exited with code 1", "was killed by
        SIGKILL".

        May be awaited by many.
        """
        if self._end is None:
            raise RuntimeError("the child was never started")
        return await asyncio.shield(self._end)

    async def stop(self, grace: float = 30.0) -> None:
        """Ask it to end, and after `grace` seconds kill it and whatever it started.

        Returns when nothing is left.
        """
        for number, patience in (
            (signal.SIGTERM, grace),
            (guard.KILL_NOW, KILL_SECONDS),
            (signal.SIGKILL, None),
        ):
            if not self.is_alive:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self.ended()

    async def dump(self) -> None:
        """Write the stacks of the ranks that the child has started to its log."""
        if self.pid is not None:
            await asyncio.to_thread(dump, self.pid, self.log)

    def logged(self) -> int:
        """Return the length of the log in bytes; 0 without one."""
        return self._log.size()

    def tail(self, lines: int = 15, since: int = 0) -> str:
        """Return the last non-empty lines that this life logged; "" when there are none. since: of `logged`,
        to begin at.
        """
        return self._log.tail(lines, since)

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        fds = [fd, *_held_locks()]
        command = [sys.executable, "-I", "-S", guard.__file__, *map(str, fds), "--", *self.argv]
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(log, 0o600)
            self._log.began = os.fstat(log).st_size
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.env,
                cwd=self.cwd,
                umask=0o077,
                start_new_session=True,
                pass_fds=fds,
            )
        finally:
            os.close(log)
        self._pidfd = os.pidfd_open(process.pid)
        return process

    async def _watch(self, process: subprocess.Popen[bytes], ours: socket.socket) -> str:
        """Holds `ours` open as long as the guard lives."""
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._pidfd)
            ours.close()
        code = process.wait()
        if code < 0:
            await asyncio.to_thread(sweep, self.record)
        self.record.unlink(missing_ok=True)
        os.close(self._pidfd)
        return _in_words(code)

    def _write_record(self, guard_pid: int) -> None:
        life = Life(guard_pid, int(guard.read_stat(guard_pid)[_STARTED]), boot_id(), str(self.log.resolve()))
        write_whole(self.record, msgspec.json.encode(life), durable=False)


def _held_locks() -> list[int]:
    """File descriptors of the locks that this process was started with, of devices: its shim took them. The
    one of its own life (`AttemptDir.lock`) is not among them."""
    return [fd for name in os.listdir("/proc/self/fd") if (fd := int(name)) > 2 and _is_lock(fd)]


def _is_lock(fd: int) -> bool:
    with contextlib.suppress(OSError):
        place = Path(os.readlink(f"/proc/self/fd/{fd}"))
        is_own = place.name == AttemptDir(place.parent).lock.name
        return (
            os.get_inheritable(fd) and not is_own and "FLOCK" in Path(f"/proc/self/fdinfo/{fd}").read_text()
        )
    return False


def _in_words(code: int) -> str:
    """Describe a guard's exit code; negative when the guard itself was killed, and the child with it."""
    if code < 0:
        return f"was killed with its guard, by {signal.Signals(-code).name}"
    if code - 128 in set(signal.Signals):
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with code {code}"


def sweep(record: Path) -> bool:
    """Kill what is left of the processes in a record, and remove the record. Returns False when nothing was
    left.

    A process that was given a pid again is not touched. Blocks until all is gone, usually for milliseconds.
    """
    try:
        life = msgspec.json.decode(record.read_bytes(), type=Life)
    except (OSError, msgspec.DecodeError):
        return False
    found = False
    if life.boot_id == boot_id():
        found = _end_guard(life)
        found |= _kill_writers(life)
    record.unlink(missing_ok=True)
    return found


def _end_guard(life: Life) -> bool:
    """Have the guard kill its child; False when the guard is gone."""
    with contextlib.suppress(ProcessLookupError), _closing_pidfd(life.guard_pid) as pidfd:
        if start_time(life.guard_pid) != life.start_time:
            return False
        over = select.poll()
        over.register(pidfd, select.POLLIN)
        for number in (guard.KILL_NOW, signal.SIGKILL):
            signal.pidfd_send_signal(pidfd, number)
            if over.poll(KILL_SECONDS * 1000):
                break
        return True
    return False


def _kill_writers(life: Life) -> bool:
    """Kill what a killed guard could not: the processes of this life whose output is the child's log. Wait
    until they are gone, and those that were ending already.
    """
    found, pids, deadline = False, set[int](), time.monotonic() + KILL_SECONDS
    while (pids := _left(life, pids)) and time.monotonic() < deadline:
        found = True
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError), _closing_pidfd(pid) as pidfd:
                if _writes_for(pid, life):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        time.sleep(0.01)
    return found


def _left(life: Life, before: set[int]) -> set[int]:
    """Return the processes of a life that are not gone. before: those of the last look, which may have closed
    the log since.
    """
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    return {
        pid
        for pid in pids
        if _writes_for(pid, life) or _ends_of(pid, life) or (pid in before and start_time(pid) is not None)
    }


def _ends_of(pid: int, life: Life) -> bool:
    """Check whether a process that the guard had in its session is ending, and may have closed the log."""
    stat = guard.read_stat(pid)
    return (
        bool(stat)
        and int(stat[_SESSION]) == life.guard_pid
        and bool(int(stat[_FLAGS]) & _PF_EXITING)
        and stat[0] not in (b"Z", b"X")
        and int(stat[_STARTED]) >= life.start_time
    )


def _writes_for(pid: int, life: Life) -> bool:
    started = start_time(pid)
    if started is None or started < life.start_time or pid == os.getpid():
        return False
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samefile(f"/proc/{pid}/fd/{fd}", life.log):
                return True
    return False


@contextlib.contextmanager
def _closing_pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; None when it is gone, a zombie included."""
    stat = guard.read_stat(pid)
    return int(stat[_STARTED]) if stat and stat[0] not in (b"Z", b"X") else None


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def cause(log_text: str) -> str:
    """Return what went wrong first in the end of a log:
    the traces of other processes that follow say less.
    """
    lines = [line for line in log_text.splitlines() if not _NOISE.search(line)]
    faults = (n for n, line in enumerate(lines) if _FAULT.search(line) and not SURVIVED.search(line))
    first = next(faults, None)
    shown = lines[-3:] if first is None else lines[first : first + 3]
    return "its log: " + "\n".join(shown)
