"""Processes of a daemon that are forked from the warm process, with what they import imported."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, cast

from msgspec.structs import replace

from lorad.box.paths import Home
from lorad.children.ask import under_guard
from lorad.daemon.process import enter
from lorad.daemon.process.processes import Processes
from tests.kit.warm import client
from tests.kit.warm.client import GROUP, PLACE
from tests.kit.warm.ranks import interpreter

MOST_ENDS = 100
CLIENT = (sys.executable, "-I", "-S", client.__file__)


def is_warm(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a warm process serves the tests."""
    return bool(environment.get(PLACE))


def python(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return what stands for `python` in a command line: a fork of the warm process, where there is one."""
    return CLIENT if is_warm(environment) else (sys.executable,)


class WarmProcesses(Processes):
    """Shims are children of the warm process, where there is one: connections to it tell of their ends."""

    _ends: ClassVar[dict[Path, int]] = {}  # descriptors that can be read when the shim of a directory is over

    def start_shim(self, root: Path) -> int:
        if not is_warm():
            return super().start_shim(root)
        asked: dict[str, object] = {"kind": "shim", "root": str(root), "detached": True}
        asked |= {"env": dict(os.environ), "cwd": os.getcwd()}
        connection, pid = client.ask(os.environ[PLACE], asked, argv_of(root), [])
        if len(WarmProcesses._ends) > MOST_ENDS:  # of daemons that are gone
            for other in [other for other, fd in WarmProcesses._ends.items() if can_read(fd, 0)]:
                os.close(WarmProcesses._ends.pop(other))
        WarmProcesses._ends[root] = connection.detach()
        return pid

    def has_ended(self, root: Path, pid: int) -> bool:
        if not is_warm():
            return super().has_ended(root, pid)
        fd = WarmProcesses._ends.get(root)
        if fd is None:
            return True
        if not can_read(fd, 0):
            return False
        os.close(WarmProcesses._ends.pop(root))
        return True


def enters(argv: Sequence[str]) -> bool:
    """Whether a command becomes another user before it becomes the program."""
    return list(argv[:4]) == [sys.executable, "-I", "-S", enter.__file__]


def argv_of(root: Path) -> list[str]:
    """Read what the shim of an attempt is to start."""
    argv: list[str] = json.loads((root / "command.json").read_bytes())["argv"]
    return argv


def can_read(fd: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def have_warm_children() -> None:
    """Have what this process renders templates with, and asks for the names of a model, forked."""
    from lorad.backends.installed import interpreter_of
    from lorad.preflight import trainers
    from lorad.rl import templates

    def warm_interpreter(backend: str, named: Path | None) -> Path:
        return Path(interpreter(str(interpreter_of(backend, named))))

    templates._COMMAND[0] = interpreter(sys.executable)
    vars(trainers)["interpreter_of"] = warm_interpreter


def keep_warm() -> None:
    """Have a process of lorad that was forked from the warm process start others from there too."""
    from lorad.client import evaluate, launch
    from lorad.daemon.api.verbs import generate, trial
    from lorad.daemon.runs import preflight

    have_warm_children()
    evaluate._COMMAND[:1] = python()

    def warm_guarded(argv: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
        if enters(argv):  # the environment of another user, who does not reach the warm process
            env = dict(env) | {name: os.environ[name] for name in (PLACE, GROUP) if name in os.environ}
            return under_guard([*python(env), *argv[1:]], env, **options)
        is_python = argv[0] == sys.executable and "-I" not in argv
        return under_guard([*python(env), *argv[1:]] if is_python else argv, env, **options)

    if (remote := sys.modules.get("lorad.trainers.ranks.remote")) is not None:  # a pool
        config = remote._config

        def warm_config(setup: Any, *more: Any) -> Any:
            return config(replace(setup, python=interpreter(setup.python or sys.executable)), *more)

        remote._config = warm_config  # type: ignore[attr-defined]
    for place, name, value in (
        (Processes, "start_shim", WarmProcesses.start_shim),
        (Processes, "has_ended", WarmProcesses.has_ended),
        (preflight, "under_guard", warm_guarded),
        (trial, "under_guard", warm_guarded),
        (generate, "under_guard", warm_guarded),
        (launch, "_spawn", WarmDaemon),
    ):
        setattr(place, name, value)


class Forked(subprocess.Popen[bytes]):
    """A fork of the warm process, by whose own pid it is signalled."""

    def __init__(self, asked: dict[str, object], fds: list[int]) -> None:
        argv = self.args = cast("list[str]", asked["argv"])
        self._connection, self.pid = client.ask(os.environ[PLACE], asked, argv, fds)
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None

    @classmethod
    def with_pipes(cls, argv: Sequence[str], environment: Mapping[str, str]) -> "Forked":
        """Start `python ARGV` with pipes for its input and output; it ends with this process."""
        into, out = os.pipe(), os.pipe()
        asked = client.question(list(argv), dict(environment), os.getcwd())
        process = cls(asked, [into[0], out[1], 2])
        for fd in (into[0], out[1]):
            os.close(fd)
        process.stdin, process.stdout = os.fdopen(into[1], "wb"), os.fdopen(out[0], "rb")
        return process

    def poll(self) -> int | None:
        """Return the exit code, once there is one."""
        if self.returncode is None and can_read(self._connection.fileno(), 0):
            self._take()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not can_read(self._connection.fileno(), timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take()
        assert self.returncode is not None
        return self.returncode

    def __del__(self) -> None:
        """Leave what is detached alone."""
        self._connection.close()

    def _take(self) -> None:
        ended = self._connection.recv(64)
        self.returncode = int(ended) if ended else 1
        self._connection.close()


def started(
    argv: Sequence[str], environment: Mapping[str, str], cwd: str | Path, fds: list[int], *, detached: bool
) -> subprocess.Popen[bytes]:
    """Start `python ARGV` with these three descriptors: a fork of the warm process, where there is one."""
    if is_warm():
        return Forked(client.question([*argv], dict(environment), str(cwd)) | {"detached": detached}, fds)
    stdin, stdout, stderr = fds
    return subprocess.Popen(
        [sys.executable, *argv],
        env=environment, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=detached,
    )  # fmt: skip


class WarmDaemon(Forked):
    """A daemon that was forked; it outlives this process."""

    def __init__(self, home: Home, log: IO[bytes], *, system: bool = False) -> None:
        argv = ["-m", "lorad.daemon", *(["--system"] if system else [])]
        environment = {name: value for name, value in os.environ.items() if name != "LORAD_ATTEMPT"}
        asked = client.question(argv, environment | {"LORAD_HOME": str(home.root)}, "/") | {"detached": True}
        with open(os.devnull, "r+b") as nothing:
            super().__init__(asked, [nothing.fileno(), log.fileno(), log.fileno()])
