"""Agent programs: coroutine functions of the user's, which play episodes with the model by HTTP.

Their processes may be killed, and their episodes end with them.
"""

import ast
import contextlib
import itertools
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict
from msgspec.structs import replace as changed

from lorad.box.paths import private_directory
from lorad.children.sandbox import sandboxed
from lorad.children.user_process import Lost, UserProcess, code_of, environment, interpreter
from lorad.children.user_serve import ProgramSetup, Ready
from lorad.envs.format import Format
from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.rl.generated.environment import VERIFIERS_CHILD, setup_of
from lorad.spec.env import EnvSpec

_CHILD = "lorad.envs.program_child"
_GRACE_SECONDS = 2.0  # for a process that times its episodes itself
_IDLE_SECONDS = 3600.0
_OTHERS = "its process ended with another episode"


class Play(Struct, frozen=True):
    """Asks for an episode, by the arguments of the function."""

    base_url: str  # the episode's door
    task: dict[str, Any]  # the row
    sampling: dict[str, Any]  # the settings of a request


class Played(Struct, frozen=True):
    """The function's result, or an error.

    Attributes:
        play: The number of the episode in its process.
        is_last: Whether the process is of no further use.
        is_limited: Whether env.turns ended the episode, as a limit that the program keeps itself.
        is_shared: Whether the process was lost with other episodes, any of which may be the reason.
    """

    reward: float | None = None
    metrics: dict[str, float] = {}
    error: str = ""
    seconds: float = 0.0
    is_last: bool = False
    play: int = 0
    is_shared: bool = False
    is_limited: bool = False


def is_program(spec: EnvSpec, cwd: Path) -> bool:
    """Return whether the name is a coroutine function's, or that of an environment of verifiers.

    Raises SpecError where there is no file.
    """
    if spec.package:
        return True
    if spec.name is None or ":" not in spec.name:
        return False
    code = code_of(spec.name, cwd, "env.name", 0)
    try:
        parts = ast.parse(code.source).body
    except (SyntaxError, ValueError):  # which its import reports
        return False
    return any(isinstance(part, ast.AsyncFunctionDef) and part.name == code.function for part in parts)


class Programs:
    """Runs `env.workers` processes, each with `env.concurrency` episodes at a time. Safe between threads."""

    def __init__(self, spec: EnvSpec, cwd: Path, owner: Path | None = None) -> None:
        """Read the spec; relative paths start at `cwd`.

        In a sandbox the door is a Unix socket in a directory that depends on `owner` alone; without an owner
        there is no door. Raises SpecError for an unknown file or interpreter.
        """
        assert spec.name is not None
        self.file: Path | None = None
        self._setup: ProgramSetup
        if spec.package:
            self._setup = setup_of(spec)
        else:
            code = code_of(spec.name, cwd, "env.name", spec.memory_bytes)
            own = {"memory_key": "env.memory", "args": spec.args, "timeout": spec.episode_timeout}
            self._setup = ProgramSetup(**asdict(code) | own)
            self.file = Path(code.file)
        self.source = self._setup.source
        self._python = interpreter(spec.python, cwd, "env.python")
        self._environment = environment(os.environ, spec.pass_env)
        self.door: Path | None = None
        self._within: list[str] = []
        if spec.sandbox != "none" and self.file is not None:
            shown = []
            if owner is not None:
                shown.append(private_directory(owner))
                shown[0].mkdir(mode=0o700, exist_ok=True)
                self.door = shown[0] / "door"
                self._setup.door = str(self.door)
            own_python = (self.file, self._python, self._environment)
            self._within = sandboxed(*own_python, "env.sandbox", shown=shown)
        self._start_timeout = spec.start_timeout
        self._concurrency = spec.concurrency
        self._workers = [_ProgramProcess(self._open, spec.episode_timeout) for _ in range(spec.workers)]
        self._changed = threading.Condition()
        self._closed = False

    def start(self) -> None:
        """Load the function now. Raises SpecError when it cannot be loaded."""
        self._workers[0].start()

    def play(self, play: Play, *, alone: bool = False) -> Played:
        """Play an episode once a process has time, and `alone` if no other may be in its process.

        Blocks; never raises for what user code does.
        """
        with HEART.waits():
            with self._changed:
                while True:  # until a process has room; an episode alone reserves it until the others end
                    free = [worker for worker in self._workers if not worker.is_reserved]
                    worker = min(free, key=lambda worker: worker.taken, default=None)
                    if worker is not None and (alone or worker.taken < self._concurrency):
                        break
                    self._changed.wait()
                worker.is_reserved = alone
                self._changed.wait_for(lambda: not alone or worker.taken == 0)
                worker.taken += 1
            try:
                return worker.play(play)
            finally:
                with self._changed:
                    worker.taken -= 1
                    worker.is_reserved = worker.is_reserved and not alone
                    self._changed.notify_all()

    def close(self) -> None:
        """Kill the processes, also under `play` in another thread, whose episode then fails."""
        self._closed = True
        for worker in self._workers:
            worker.close()
        if self.door is not None:
            shutil.rmtree(self.door.parent, ignore_errors=True)

    def _open(self, worker: "_ProgramProcess") -> None:
        """Start a worker's process and load the function there. Raises SpecError."""
        module = _CHILD if self.file is not None else VERIFIERS_CHILD
        child = UserProcess(module, "agent", self._environment, self._python, self._within)
        worker.process = child
        if self._closed:  # by another thread, which may not have seen the child
            child.signal()
        child.load(self._setup, "env.name", Ready, self._start_timeout, ", or raise env.start_timeout")


@dataclass(eq=False)
class _AwaitedEpisode:
    """An episode until `deadline` (time.monotonic()), with a queue for its result."""

    deadline: float
    ended: "queue.SimpleQueue[Played]"


class _ProgramProcess:
    """Has one process at a time, and a thread that listens to it while it lives."""

    def __init__(self, open_process: Callable[["_ProgramProcess"], None], timeout: float) -> None:
        self._open = open_process  # it sets `process`
        self._timeout = timeout
        self.taken = 0  # the number of its episodes
        self.is_reserved = False  # for an episode that must be alone
        self.process: UserProcess | None = None
        self._listener: threading.Thread | None = None
        self._is_listening = False
        self._lines: list[bytes] = []
        self._under_way: dict[int, _AwaitedEpisode] = {}
        self._numbers = itertools.count(1)
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self) -> None:
        """Have a process that has loaded the function. Raises SpecError."""
        with self._starting:
            if self._is_listening:
                return
            if self._listener is not None:
                self._listener.join()
            try:
                self._open(self)
            except SpecError:
                self._drop()
                raise
            self._is_listening = True
            self._listener = threading.Thread(target=self._listen, name="episodes", daemon=True)
            self._listener.start()

    def play(self, play: Play) -> Played:
        """Have the process play an episode, and wait for its end."""
        began = time.monotonic()
        own = None
        while own is None:
            try:
                self.start()
            except SpecError as error:
                return Played(error=str(error), seconds=time.monotonic() - began)
            with self._lock:
                if not self._is_listening:  # the process was lost meanwhile
                    continue
                own = _AwaitedEpisode(time.monotonic() + self._timeout + _GRACE_SECONDS, queue.SimpleQueue())
                number = next(self._numbers)
                self._under_way[number] = own
                self._lines.append(msgspec.json.encode({**asdict(play), "play": number}))
                os.eventfd_write(self._bell, 1)
        return changed(own.ended.get(), seconds=time.monotonic() - began)

    def close(self) -> None:
        """Kill the process, and wait until its episodes have failed."""
        if (process := self.process) is not None:
            process.signal()
        with self._starting:
            if self._listener is not None:
                self._listener.join()
            if self._bell >= 0:
                os.close(self._bell)
            self._bell = -1

    def _drop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _listen(self) -> None:
        """Pass the process's answers on until it is lost, which fails its episodes."""
        assert self.process is not None
        try:
            while True:
                with self._lock:
                    for request in self._lines:
                        self.process.send(request)
                    self._lines.clear()
                    deadlines = [own.deadline for own in self._under_way.values()]
                end = min(deadlines, default=time.monotonic() + _IDLE_SECONDS)
                line = self.process.receive(end, self._bell)
                if line is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)
                    if deadlines and time.monotonic() >= end:
                        raise Lost(f"it took {self._timeout:g} s (env.episode_timeout)")
                    continue
                played = msgspec.json.decode(line, type=Played)
                with self._lock:
                    over = self._under_way.pop(played.play, None)
                if over is not None:
                    over.ended.put(played)
                if played.is_last:
                    raise Lost(_OTHERS)
        except (Lost, msgspec.MsgspecError) as error:
            why = str(error)
        self._drop()
        with self._lock:
            self._is_listening = False
            episodes = [*self._under_way.values()]
            self._under_way.clear()
            self._lines.clear()
        for own in episodes:
            own.ended.put(Played(error=why, is_shared=len(episodes) > 1 or why == _OTHERS))


class ProgramHosts:
    """The programs of training, and those of evals."""

    def __init__(self, spec: EnvSpec, cwd: Path, format: Format, owner: Path) -> None:
        """Raises SpecError."""
        self.has_warned = False  # that turns were cut without ending their episodes
        self.format = format
        self.training = Programs(spec, cwd, owner / "training")
        self.evals = Programs(spec, cwd, owner / "evals")

    def close(self) -> None:
        self.training.close()
        self.evals.close()
