"""Two processes that have imported what lorad's processes import, and fork them: one has torch, one has not.

A test worker, a pool, a driver or a command line begins within some 40 milliseconds of processor time
instead of after up to five seconds of imports. `python -m tests.kit.warm.server FD FD [--now]` serves at two
listening sockets until its standard input ends. Each has one thread and computes nothing, so that a fork is
as good as a fresh interpreter. What differs: /proc shows the command line and the environment of the warm
process, and malloc and OpenMP were set up by it. `--only FD MODULE…` serves at one socket, with those alone.
"""

import ast
import atexit
import ctypes
import gc
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import lorad
from lorad.daemon.process import enter, shim
from lorad.protocol.structs import learn_structs
from tests.kit.warm.client import GROUP, HEAVY_FILES, MESSAGE_BYTES, NAMES, PLACE, TEMPLATES, WORKER
from tests.kit.warm.processes import enters, keep_warm

HIDDEN = ("pandas",)  # see lorad/daemon/__main__.py
PR_SET_DUMPABLE = 4
MADV_COLLAPSE = 25
HUGE = 1 << 21  # bytes of a huge page
UID = os.geteuid()  # of the warm process
LIGHT = ("aiohttp.web", "rich.console")
# the rooms and modules of lorad that reach torch
HEAVY = (
    *("models", "trainers", "engines", "pool", "backends.engine_trial", "tui"),
    *("rl.loss", "rl.user.autograd", "rl.value_loss"),
)
# for many tests: what pools of real bases import, which takes twice the rest, and workers of pytest
OF_MANY = (
    *("transformers", "peft", "transformers.models.qwen3.modeling_qwen3", "pyarrow.parquet"),
    *("pytest", "pytest_asyncio", "xdist.remote", "hypothesis", "syrupy", "textual.app"),
    *("anthropic", "openai"),  # whose thousands of modules some tests import
)
HEAVIEST = ("lorad.trainers.fsdp", "lorad.engines.generic", "lorad.models.hf", "lorad.tui")
LEFT_OUT = (
    *("migrations", "grants.ray", "driver.user"),
    "rl.template_child",  # see load_templates
)


stand_ins: dict[str, Any] = {}  # modules of _OF_TEMPLATES as templates have them
_OF_TEMPLATES = ("transformers", "huggingface_hub")


class Child:
    """A process that was forked for a connection."""

    def __init__(self, pid: int, connection: socket.socket, *, detached: bool) -> None:
        self.pid, self.connection, self.detached = pid, connection, detached
        self.pidfd = os.pidfd_open(pid)


class Server:
    """Answers one question after the other; children are watched by their pidfds."""

    def __init__(self, listener: socket.socket, names: Sequence[str], hidden: Sequence[str] = ()) -> None:
        self.names = names  # of modules, to be imported before the first fork
        self.hidden = hidden  # from them
        self.listener = listener
        self.poll = select.poll()
        self.is_loaded = False
        self.children: dict[int, Child] = {}  # by the descriptors of their pidfds and connections

    def load(self) -> None:
        """Import what children need; what is missing in an environment is left out."""
        self.is_loaded = True
        sys.modules |= dict.fromkeys(self.hidden)  # type: ignore[arg-type]
        with without_collector():
            for name in self.names:
                with suppress(Exception):
                    __import__(name)  # as a statement does, which stand-ins listen to
            learn_structs()  # which takes each child a tenth of a second
        for name in self.hidden:
            del sys.modules[name]

    def serve(self) -> None:
        """Answer until standard input ends."""
        for fd in (0, self.listener.fileno()):
            self.poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll():
                if fd == 0:
                    return
                if fd == self.listener.fileno():
                    self._answer(self.listener.accept()[0])
                elif (child := self.children.get(fd)) is not None:
                    if fd == child.pidfd:
                        self._ended(child)
                    else:
                        self._signal(child)

    def _answer(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MESSAGE_BYTES)
        if not self.is_loaded:
            self.load()
        data, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not data:
            connection.close()
            return
        asked = ast.literal_eval(data.decode())
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            pid = os.fork()  # beside the thread of pyarrow's allocator, which Python 3.12 and later warn of
        if pid == 0:
            become(asked, fds)
        for fd in fds:
            os.close(fd)
        child = Child(pid, connection, detached=asked.get("detached", False))
        for fd in (child.pidfd, connection.fileno()):
            self.children[fd] = child
            self.poll.register(fd, select.POLLIN)
        with suppress(OSError):
            connection.send(str(pid).encode())

    def _ended(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        with suppress(OSError):
            child.connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        self._forget(child)

    def _signal(self, child: Child) -> None:
        """Pass a signal on; whoever asked and is gone ends what was forked for it."""
        data = b""
        with suppress(OSError):
            data = child.connection.recv(64)
        if not data:
            self.poll.unregister(child.connection)
            del self.children[child.connection.fileno()]
            if child.detached:
                return
        with suppress(ProcessLookupError):
            os.kill(child.pid, int(data) if data else signal.SIGKILL)

    def _forget(self, child: Child) -> None:
        for fd in (child.pidfd, child.connection.fileno()):
            if self.children.pop(fd, None) is not None:
                self.poll.unregister(fd)
        os.close(child.pidfd)
        child.connection.close()


def become(asked: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    """Be the process that was asked for, in the fork; never returns."""
    code = 1
    try:
        for target, fd in enumerate(fds or [os.open(os.devnull, os.O_RDWR)] * 3):
            os.dup2(fd, target)
        os.closerange(3, 1 << 16)
        begin_anew(asked["env"], asked["cwd"])
        if "umask" in asked:
            os.umask(asked["umask"])
        if asked.get("detached"):
            os.setsid()
        if asked["kind"] == "shim":
            os.execvpe = exec_or_run  # type: ignore[assignment]
            code = ended_with(lambda: run_shim(asked["root"]))
        else:
            code = ended_with(lambda: run(asked["argv"]))
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def begin_anew(environment: dict[str, str], cwd: str) -> None:
    """What an interpreter begins with: signals, environment, directory, standard streams."""
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (group := environment.get(GROUP)) and os.geteuid() == UID:  # else it is of the group already
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None  # where this one looks is in its own environment
    os.chdir(cwd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=bool(environment.get("PYTHONUNBUFFERED")))
    gc.enable()


def ended_with(work: Callable[[], object]) -> int:
    """Work as the main module of an interpreter does, to its end; returns the exit code."""
    try:
        code = exit_code(work)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        return 130
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    return code


def exit_code(work: Callable[[], object]) -> int:
    try:
        returned = work()
        return returned if isinstance(returned, int) else 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def run_shim(root: str) -> int:
    sys.argv = [shim.__file__, root]
    return shim.main()


def run(argv: Sequence[str]) -> None:
    """Run what `python ARGV` runs."""
    words, safe = list(argv), False
    if any(word == WORKER or word.endswith(HEAVY_FILES) for word in words):
        # threads of gloo try again and again to get a lock of one that was preempted: fewer are so
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    while words and words[0] in ("-u", "-B", "-P", "-I", "-S"):
        safe = words.pop(0) in ("-P", "-I") or safe
    for place in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(0, place)
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        if not safe:
            sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        if words[1].partition(".")[0] == "lorad" and words[1] not in (WORKER, *NAMES):
            keep_warm()
        if words[1] == TEMPLATES:
            sys.modules |= stand_ins
        sys.modules.pop(f"{words[1]}.__main__", None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        if words[0] == enter.__file__:
            os.execvpe = exec_or_run  # type: ignore[assignment]
        runpy.run_path(words[0], run_name="__main__")


def exec_or_run(file: str, argv: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """In place of os.execvpe in the fork of a shim, and of what becomes another user: Python programs are run
    here, others executed.
    """
    if file != sys.executable or ("-I" in argv and not enters(argv)):
        real_execvpe(file, list(argv), environment)
    environment = dict(environment)
    if os.geteuid() != UID:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as exec does: what is in /proc is its user's
        environment.pop(PLACE, None)  # which that user does not reach
    begin_anew(environment, os.getcwd())
    os._exit(ended_with(lambda: run(argv[1:])))


real_execvpe = os.execvpe


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.freeze()


def huge_pages() -> None:
    """Have the kernel keep what is imported in huge pages, where it can: a fork copies an entry for each,
    and its end drops it, which of small pages takes half of what many a process of the tests takes in all.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file]
    for place, access, *_, name in (line if len(line) == 6 else [*line, ""] for line in lines):
        if access == "rw-p" and name in ("", "[heap]"):
            start, end = (int(address, 16) for address in place.split("-"))
            for address in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):
                advise(address, HUGE, MADV_COLLAPSE)


def load_templates() -> None:
    """Import what renders templates, and put aside its stand-in for transformers, and huggingface_hub, which
    reads the environment when it is imported.
    """
    with suppress(Exception):
        __import__(TEMPLATES)
    sys.modules.pop(TEMPLATES, None)
    for name in [name for name in sys.modules if name.partition(".")[0] in _OF_TEMPLATES]:
        stand_ins[name] = sys.modules.pop(name)


def modules(*, heavy: bool) -> Iterator[str]:
    """Yield the modules of lorad that reach torch, or the others; none is imported for that."""
    root = os.path.dirname(lorad.__file__)
    for folder, _, files in os.walk(root, followlinks=True):
        for file in files:
            name = os.path.relpath(os.path.join(folder, file), root).removesuffix(".py").replace("/", ".")
            is_left_out = not file.endswith(".py") or file.startswith("__") or name.startswith(LEFT_OUT)
            if not is_left_out and name.startswith(HEAVY) is heavy:
                yield f"lorad.{name}"


def main() -> None:
    if sys.argv[1] == "--only":
        Server(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]).serve()
        return
    listeners = [socket.socket(fileno=int(fd)) for fd in sys.argv[1:3]]
    light = Server(listeners[0], [*LIGHT, *modules(heavy=False)], HIDDEN)
    is_for_many = "--now" in sys.argv
    of_many = OF_MANY if is_for_many else ()
    own = (name for name in modules(heavy=True) if is_for_many or not name.startswith(HEAVIEST))
    heavy = Server(listeners[1], ["torch", *of_many, *own], HIDDEN)
    if not is_for_many:  # many a test asks for nothing
        asked, _, _ = select.select([0, *(listener.fileno() for listener in listeners)], [], [])
        if 0 in asked:
            return
    light.load()
    with without_collector():
        load_templates()
    if os.fork():
        heavy.listener.close()
        if is_for_many:
            huge_pages()
        light.serve()
    else:
        light.listener.close()
        if is_for_many:
            heavy.load()
            huge_pages()
        heavy.serve()


if __name__ == "__main__":
    main()
