"""Agent programs: an episode is what a coroutine function of the user's says to the model, by HTTP.

Their processes may be killed, but an episode does not outlive its own: nothing plays it to another one.
"""

import ast
import os
import queue
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from lorad.children.user_process import Lost, UserProcess, code_of, environment, interpreter
from lorad.children.user_serve import Code, Ready
from lorad.envs.format import Format
from lorad.envs.host import Hosts
from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.spec.env import EnvSpec

_CHILD = "lorad.envs.program_child"


class _Setup(Code):
    """The function of a program, with `args` as its keywords."""

    args: dict[str, Any] = msgspec.field(default_factory=dict)


class Play(Struct, frozen=True):
    """What the function is called with. task: the row. sampling: what a request may ask for."""

    base_url: str
    task: dict[str, Any]
    sampling: dict[str, Any]


class Played(Struct, frozen=True):
    """What it returned, or what went wrong."""

    reward: float | None = None
    error: str = ""
    seconds: float = 0.0
    is_last: bool = False


def is_program(spec: EnvSpec, cwd: Path) -> bool:
    """Return whether the name is that of a coroutine function. Raises SpecError where there is no file."""
    if spec.name is None or ":" not in spec.name:
        return False
    code = code_of(spec.name, cwd, "env.name", 0)
    try:
        parts = ast.parse(code.source).body
    except (SyntaxError, ValueError):  # said when it is imported
        return False
    return any(isinstance(part, ast.AsyncFunctionDef) and part.name == code.function for part in parts)


class Programs:
    """Runs `env.workers` processes, each with an episode at a time. Safe between threads."""

    def __init__(self, spec: EnvSpec, cwd: Path) -> None:
        """Raises SpecError for an unknown file or interpreter."""
        assert spec.name is not None
        if spec.sandbox != "none":
            raise SpecError(
                f"{spec.name} speaks with the model over the network, which the sandbox has none of",
                key="env.sandbox",
                hint="Leave it out.",
            )
        code = code_of(spec.name, cwd, "env.name", spec.memory_bytes)
        self._setup = _Setup(**asdict(code) | {"memory_key": "env.memory", "args": spec.args})
        self.file = Path(code.file)
        self.source = code.source
        self._python = interpreter(spec.python, cwd, "env.python")
        self._environment = environment(os.environ, spec.pass_env)
        self._timeout = spec.episode_timeout
        self._workers = spec.workers
        self._children: dict[int, UserProcess] = {}
        self._idle: queue.Queue[int] = queue.Queue()
        for number in range(spec.workers):
            self._idle.put(number)
        self._closed = False

    def start(self) -> None:
        """Load the function now. Raises SpecError when it cannot be loaded."""
        self._child(0)

    def play(self, play: Play) -> Played:
        """Play an episode as soon as a process has time. Blocks; never raises for what user code does."""
        with HEART.waits():
            number = self._idle.get()
            started = time.monotonic()
            try:
                played = self._child(number).ask(play, Played, self._timeout)
            except (SpecError, Lost) as error:
                self._stop(number)
                why = str(error)
                if time.monotonic() - started >= self._timeout:
                    why = f"it took {self._timeout:g} s (env.episode_timeout)"
                played = Played(error=why, seconds=time.monotonic() - started)
            finally:
                self._idle.put(number)
        return played

    def close(self) -> None:
        """Kill the processes, also under `play` in another thread, whose episode then fails."""
        self._closed = True
        for child in [*self._children.values()]:
            child.signal()
        numbers = [self._idle.get() for _ in range(self._workers)]
        for number in numbers:
            self._stop(number)
            self._idle.put(number)  # for threads that wait, which learn that it is closed

    def _child(self, number: int) -> UserProcess:
        """Raises SpecError."""
        if self._closed:
            raise SpecError("the programs are closed", key="env.name", hint="")
        child = self._children.get(number)
        if child is not None and child.alive:
            return child
        self._stop(number)
        child = self._children[number] = UserProcess(_CHILD, "agent", self._environment, self._python)
        try:
            child.load(self._setup, "env.name", Ready)
        except SpecError:
            self._stop(number)
            raise
        return child

    def _stop(self, number: int) -> None:
        if (child := self._children.pop(number, None)) is not None:
            child.kill()


def open_hosts(spec: EnvSpec, cwd: Path, format: Format) -> "Hosts | ProgramHosts":
    """Return what plays the episodes of a run. Raises SpecError for an unknown name or file."""
    return ProgramHosts(spec, cwd, format) if is_program(spec, cwd) else Hosts(spec, cwd, format)


class ProgramHosts:
    """Programs of training, and those of evals."""

    def __init__(self, spec: EnvSpec, cwd: Path, format: Format) -> None:
        """Raises SpecError."""
        self.format = format
        self.training = Programs(spec, cwd)
        self.evals = Programs(spec, cwd)

    def close(self) -> None:
        self.training.close()
        self.evals.close()
