"""Watch over one child for the pool that started it: `python -I -S guard.py FD LOCK… -- argv…`.

Standard library only.

FD is a socket whose other end the pool alone holds: the guard writes the child's pid there, and its end means
that the pool is gone. Whatever the child started, in whatever session, ends with the child: where a parent
dies, its children become the guard's (PR_SET_CHILD_SUBREAPER). The guard kills only children of its own,
whose pids cannot be used again before it reaped them; their children become its own by that.

LOCKs are file descriptors of locks that the pool holds: the guard has them as long as anything of the child
is left, so that a device is not free before its memory is.

SIGTERM is passed on to the child; KILL_NOW kills it. The guard exits with the child's exit code, or 128 +
signal.
"""

import ctypes
import os
import select
import signal
import sys
import time

_TYPE_CHECKING = False
if _TYPE_CHECKING:  # typing itself would double the start-up
    from collections.abc import Iterable

KILL_NOW = signal.SIGALRM  # the guard's own alarm included
_TO_CHILD = {signal.SIGTERM: signal.SIGTERM, KILL_NOW: signal.SIGKILL}
_HEARD = (*_TO_CHILD, signal.SIGCHLD)
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ)
_GRACE_SECONDS = 10  # for the child, once the pool is gone
# for what the child leaves: multiprocessing's tracker frees shared memory as its last act
LINGER_SECONDS = 1.0
KILL_SECONDS = 5.0  # for killed processes to go; some never do, while a driver holds them
END_SECONDS = LINGER_SECONDS + KILL_SECONDS + 1.0  # for a guard that hears KILL_NOW to end
_EX_EXEC = 127  # the child's program could not be executed
_PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def command(argv: "Iterable[str]", *fds: int) -> list[str]:
    """Put a guard in front of a command. It inherits `fds`: its socket, then locks."""
    return [sys.executable, "-I", "-S", __file__, *map(str, fds), "--", *argv]


def killed_by(code: int) -> signal.Signals | None:
    """Return the signal that killed a guard's child, by the guard's exit code; None if the child exited."""
    try:
        return signal.Signals(code - 128)
    except ValueError:
        return None


def main() -> int:
    """Watch over the child from its start to its end, and end what it leaves; return the exit code."""
    end = sys.argv.index("--")
    pool, *locks = map(int, sys.argv[1:end])
    argv = sys.argv[end + 1 :]
    for lock in locks:
        os.set_inheritable(lock, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    heard, wakeup = os.pipe()  # the numbers of all signals in _HEARD can be read there
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for number in _HEARD:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    child = start(argv, pool)
    try:  # noqa: SIM105 - contextlib would double the start-up
        os.write(pool, b"%d" % child)
    except BrokenPipeError:
        pass  # the pool is gone: `watch` hears of it
    code = os.waitstatus_to_exitcode(_watch(child, pool, heard))
    end_the_rest()
    return code if code >= 0 else 128 - code


def start(argv: list[str], pool: int) -> int:
    """Start the child and return its pid. It leads a process group, so that its signals spare the guard."""
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    child = os.fork()
    if child == 0:
        try:
            os.close(pool)
            os.setpgid(0, 0)
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number in (*_HEARD, *_IGNORED):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if os.getppid() == guard:
                os.execvp(argv[0], argv)
        except BaseException as error:
            os.write(2, f"lorad: cannot start {argv[0]}: {error}\n".encode())
        finally:
            os._exit(_EX_EXEC)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return child


def _watch(child: int, pool: int, heard: int) -> int:
    """Wait for the end of the child, or end it for the pool, and reap its orphans; return its wait status."""
    sources = select.poll()
    sources.register(heard, select.POLLIN)
    sources.register(pool, select.POLLIN)
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return ended[1]
        for source, _ in sources.poll():
            if source == pool:
                sources.unregister(pool)
                signal.alarm(_GRACE_SECONDS)
                os.kill(child, signal.SIGTERM)
            else:
                for number in set(os.read(heard, 512)) & set(_TO_CHILD):
                    os.kill(child, _TO_CHILD[signal.Signals(number)])


def end_the_rest() -> None:
    """Wait until there is no child, and so no descendant, killing those that linger."""
    lingered = time.monotonic() + LINGER_SECONDS
    while (now := time.monotonic()) < lingered + KILL_SECONDS:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if now >= lingered else []
        for pid in pids:
            stat = read_stat(pid)
            if stat and int(stat[1]) == os.getpid():
                try:  # noqa: SIM105
                    os.kill(pid, signal.SIGKILL)
                except PermissionError:
                    pass
        time.sleep(0.01)


def read_stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third on (state, parent, …); [] when there is no process.

    The rest of lorad has it from `lorad.children.identity`, which names the fields.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError."""
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if call(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main())
