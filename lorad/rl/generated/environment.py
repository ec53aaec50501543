"""The environments of `verifiers`: the process that plays one, and the rows that it has."""

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from lorad.box.machine import read_machine
from lorad.children.user_process import UserProcess, environment, interpreter
from lorad.children.user_serve import Code, Ready
from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.rl.sources import Row
from lorad.spec.env import EnvSpec

CHILD = "lorad.envs.verifiers_child"
_KEY = "env.name"
_HELD_OUT = 16  # prompts, of which one is held out
_HINT = "Raise env.start_timeout."


class EnvironmentSetup(Code):
    """Names an environment of verifiers in `function`.

    Attributes:
        args: What it is made with.
        timeout: Seconds that an episode may take.
        turns: Turns of the model that an episode may have.
        lists_rows: Whether the process is to say what the environment is, and to play nothing.
    """

    args: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout: float = 0.0
    turns: int = 0
    lists_rows: bool = False


class OwnRow(msgspec.Struct, frozen=True):
    """A row of an environment.

    Attributes:
        index: Its place in the dataset that the environment trains on, or in the one that it evaluates on.
        is_held_out: Whether it is of the latter.
        prompt: What the model reads first, as text or messages.
    """

    index: int
    is_held_out: bool
    prompt: str | list[dict[str, Any]]
    answer: str = ""


class Described(Ready):
    """Says what an environment is.

    Attributes:
        versions: The versions of its package and of verifiers, by name.
        has_tools: Whether it offers the model tools.
    """

    versions: dict[str, str] = msgspec.field(default_factory=dict)
    has_tools: bool = False
    rows: list[OwnRow] = msgspec.field(default_factory=list)


def setup_of(env: EnvSpec) -> EnvironmentSetup:
    """Return what the process of an environment is told."""
    return EnvironmentSetup(
        file=env.name or "",
        function=env.package,
        memory=env.memory_bytes or read_machine().memory // 2,
        memory_key="env.memory",
        args=env.args,
        timeout=env.episode_timeout,
        turns=env.turns,
    )


def load_environment(process: UserProcess, env: EnvSpec, setup: EnvironmentSetup) -> Described:
    """Have the environment imported and made in a process of `CHILD`. Raises SpecError."""
    return process.load(setup, _KEY, Described, env.start_timeout, _HINT)


def described(env: EnvSpec, cwd: Path) -> Described:
    """Return what the environment is, with its rows, asked in its interpreter once. Raises SpecError."""
    return _described(msgspec.json.encode(env), cwd)


@lru_cache(maxsize=4)
def _described(encoded: bytes, cwd: Path) -> Described:
    env = msgspec.json.decode(encoded, type=EnvSpec)
    python = interpreter(env.python, cwd, "env.python")
    setup = setup_of(env)
    setup.lists_rows = True
    process = UserProcess(CHILD, "environment", environment(os.environ, env.pass_env), python)
    try:
        with HEART.waits():
            return load_environment(process, env, setup)
    finally:
        process.kill()


def environment_rows(env: EnvSpec, split: str, cwd: Path) -> Iterator[Row]:
    """Yield the rows of a split. Held out is what the environment evaluates on, or one prompt in 16 where it
    names nothing. Raises SpecError.
    """
    rows = described(env, cwd).rows
    if len(rows) < 2:
        problem = f"{env.name} has {len(rows)} rows, and a run needs two"
        raise SpecError(problem, key="env.args", hint="Have it make more, by its arguments.")
    names_own = any(row.is_held_out for row in rows)
    for number, row in enumerate(rows, 1):
        chosen = hashlib.sha256(msgspec.json.encode(row.prompt)).digest()[0] % _HELD_OUT == 0
        is_held_out = row.is_held_out if names_own else chosen
        if is_held_out == (split == "test"):
            yield Row(number, f"{env.name}:{number}", msgspec.to_builtins(row))
