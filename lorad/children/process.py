"""A child that ends with the pool that started it, whatever dies first."""

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from lorad.box.paths import AttemptDir
from lorad.children import guard
from lorad.children.host import WatchedProcess
from lorad.children.identity import Identity, boot_id, opened, pids, start_time, stat_of
from lorad.children.logs import SURVIVED, Log
from lorad.children.spawn import spawn
from lorad.children.stacks import dump
from lorad.errors import PoolLost
from lorad.files import write_whole

KILL_SECONDS = guard.LINGER_SECONDS + guard.KILL_SECONDS + 4.0  # the guard's own, and some for a busy machine
_PF_EXITING = 0x4  # the kernel has closed a process's files, or is about to, and it is no zombie yet
_FAULT = re.compile(r"^(?>.*?(?:Error|Exception)\b).*:|[Oo]ut of memory|error: ", re.MULTILINE)
_NOISE = re.compile(r"nanobind:|^ - leaked|resource_tracker|Ignore import error|Warning")


class Life(msgspec.Struct, frozen=True):
    """A record of a child's guard and log, by which it can be ended after the death of its pool."""

    guard_pid: int
    start_time: int
    boot_id: str
    log: str

    @property
    def guardian(self) -> Identity:
        return Identity(self.boot_id, self.guard_pid, self.start_time)


class Child(WatchedProcess):
    """One `Process` and whatever it starts, under a guard (`guard.py`) that outlives the pool.

    The child's umask is 077; it inherits stdout and stderr, and /dev/null as stdin, and nothing else.

    env: Variables that are added to the pool's own environment.
    log: A file of this child alone, by which the processes are found that write their output to it; it is
        appended to, and has mode 0600.
    record: A file for `sweep`, while the process lives.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, record: Path, cwd: Path
    ) -> None:
        self.argv = list(argv)
        self.env = dict(env)
        self.log = log
        self.record = record
        self.cwd = cwd
        self.pid: int | None = None
        self.output = Log(log)
        self._pidfd = -1  # the guard's

    async def start(self) -> None:
        """Start the child. A program that cannot be executed shows in its end and its log.

        Raises OSError (log, record, cwd) and PoolLost. Then, or when it is cancelled, the guard ends it.
        """
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:  # the guard's output is the log, and the child's
            os.fchmod(log, 0o600)
            self.output.began = os.fstat(log).st_size
            process, ours = spawn(
                self.argv,
                locks=_held_locks(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.env,
                cwd=self.cwd,
                umask=0o077,
                start_new_session=True,
            )
        finally:
            os.close(log)
        try:
            self._pidfd = os.pidfd_open(process.pid)
            self._end = asyncio.create_task(self._watch(process, ours))
            guardian = Identity.of(process.pid)
            life = Life(guardian.pid, guardian.start, guardian.boot, str(self.log.resolve()))
            write_whole(self.record, msgspec.json.encode(life), durable=False)
            ours.setblocking(False)
            pid = await asyncio.get_running_loop().sock_recv(ours, 64)
            if not pid:
                raise PoolLost(f"the guard of {self.argv[0]} {await self.ended()}", hint=f"See {self.log}.")
            self.pid = int(pid)
        except BaseException:
            ours.close()  # the guard ends what it started
            raise

    async def stop(self, grace: float = 30.0) -> None:
        steps = ((signal.SIGTERM, grace), (guard.KILL_NOW, KILL_SECONDS), (signal.SIGKILL, None))
        for number, patience in steps:
            if not self.is_alive:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self.ended()

    async def dump(self) -> None:
        if self.pid is not None:
            await asyncio.to_thread(dump, self.pid, self.log)

    async def _watch(self, process: subprocess.Popen[bytes], ours: socket.socket) -> str:
        """Wait for the end of the guard, and say how its child ended. `ours` is open as long as it lives."""
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
        if code < 0:  # the guard itself was killed, and the child with it
            return f"was killed with its guard, by {signal.Signals(-code).name}"
        if number := guard.killed_by(code):
            return f"was killed by {number.name}"
        return f"exited with code {code}"


def _held_locks() -> list[int]:
    """List the file descriptors of the locks of devices that this process's shim took and passed to it.

    The lock of its own life (`AttemptDir.lock`) is left out.
    """
    locks = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            place = Path(os.readlink(f"/proc/self/fd/{fd}"))
            is_own = place.name == AttemptDir(place.parent).lock.name
            is_passed = fd > 2 and os.get_inheritable(fd) and not is_own
            if is_passed and "FLOCK" in Path(f"/proc/self/fdinfo/{fd}").read_text():
                locks.append(fd)
    return locks


def sweep(record: Path) -> bool:
    """Kill the processes of a record, and remove the record; return False when no process was left.

    Other processes that got their pids are spared. Blocks until all is gone, usually for milliseconds.
    """
    try:
        life = msgspec.json.decode(record.read_bytes(), type=Life)
    except (OSError, msgspec.DecodeError):
        return False
    was_any = False
    if life.boot_id == boot_id():
        with contextlib.suppress(ProcessLookupError), opened(life.guard_pid) as pidfd:
            if life.guardian.is_alive:  # it kills its child
                over = select.poll()
                over.register(pidfd, select.POLLIN)
                for number in (guard.KILL_NOW, signal.SIGKILL):
                    signal.pidfd_send_signal(pidfd, number)
                    if over.poll(KILL_SECONDS * 1000):
                        break
                was_any = True
        # what a killed guard could not kill: the processes of this life whose output is the child's log
        running: set[int] = set()
        deadline = time.monotonic() + KILL_SECONDS
        while (running := _processes(life, running)) and time.monotonic() < deadline:
            was_any = True
            for pid in running:  # some were ending already
                with contextlib.suppress(ProcessLookupError, PermissionError), opened(pid) as pidfd:
                    if _writes_for(pid, life):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            time.sleep(0.01)
    record.unlink(missing_ok=True)
    return was_any


def _processes(life: Life, before: set[int]) -> set[int]:
    """Return the pids of a life: they write to its log, are in `before`, or are ending in its session.

    The latter two may have closed the log since.
    """
    running = set()
    for pid in pids():
        stat = stat_of(pid)
        is_ending = stat is not None and not stat.is_over and bool(stat.flags & _PF_EXITING)
        was_guarded = stat is not None and stat.session == life.guard_pid and stat.start >= life.start_time
        remains = pid in before and start_time(pid) is not None
        if _writes_for(pid, life) or (is_ending and was_guarded) or remains:
            running.add(pid)
    return running


def _writes_for(pid: int, life: Life) -> bool:
    """Check whether a process began in this life and has the child's log as its output."""
    started = start_time(pid)
    if started is None or started < life.start_time or pid == os.getpid():
        return False
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samefile(f"/proc/{pid}/fd/{fd}", life.log):
                return True
    return False


def cause(log_text: str) -> str:
    """Return the first fault in the end of a log: traces of processes that end by it say less."""
    lines = [line for line in log_text.splitlines() if not _NOISE.search(line)]
    faults = (n for n, line in enumerate(lines) if _FAULT.search(line) and not SURVIVED.search(line))
    first = next(faults, None)
    shown = lines[-3:] if first is None else lines[first : first + 3]
    return "its log: " + "\n".join(shown)
