"""The environments of `verifiers`: what the process of one is asked and answers, and the rows that it has."""

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from lorad.box.machine import read_machine
from lorad.children.user_process import UserProcess, environment, interpreter
from lorad.children.user_serve import ProgramSetup, Ready
from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.rl.sources import Row
from lorad.spec.env import EnvSpec

VERIFIERS_CHILD = "lorad.envs.verifiers_child"
_HELD_OUT = 16  # prompts, of which one is held out


class EnvironmentSetup(ProgramSetup):
    """The setup of an environment's process: `function` is its package, `file` its name in the spec.

    turns: Turns of the model that an episode may have.
    lists_rows: Whether the process is to say what the environment is, and to play nothing.
    """

    turns: int = 0
    lists_rows: bool = False


class OwnRow(msgspec.Struct, frozen=True):
    """A row of an environment.

    index: Its place in the dataset that the environment trains on, or evaluates on where it is held out.
    prompt: What the model reads first, as text or messages.
    """

    index: int
    is_held_out: bool
    prompt: str | list[dict[str, Any]]
    answer: str = ""


class Described(Ready):
    """What an environment is.

    versions: The versions of its package and of verifiers, by name.
    has_tools: Whether it offers the model tools.
    """

    versions: dict[str, str] = msgspec.field(default_factory=dict)
    has_tools: bool = False
    rows: list[OwnRow] = msgspec.field(default_factory=list)


def setup_of(env: EnvSpec, *, lists_rows: bool = False) -> EnvironmentSetup:
    """Return what the process of an environment is asked for."""
    return EnvironmentSetup(
        file=env.name or "",
        function=env.package,
        memory=env.memory_bytes or read_machine().memory // 2,
        memory_key="env.memory",
        args=env.args,
        timeout=env.episode_timeout,
        turns=env.turns,
        lists_rows=lists_rows,
    )


def described(env: EnvSpec, cwd: Path) -> Described:
    """Return what the environment is, with its rows, asked in its interpreter once. Raises SpecError."""
    return _described(msgspec.json.encode(env), cwd)


@lru_cache(maxsize=4)
def _described(encoded: bytes, cwd: Path) -> Described:
    env = msgspec.json.decode(encoded, type=EnvSpec)
    python = interpreter(env.python, cwd, "env.python")
    process = UserProcess(VERIFIERS_CHILD, "environment", environment(os.environ, env.pass_env), python)
    setup = setup_of(env, lists_rows=True)
    hint = ", or raise env.start_timeout"
    try:
        with HEART.waits():
            return process.load(setup, "env.name", Described, env.start_timeout, hint)
    finally:
        process.kill()


def environment_rows(env: EnvSpec, split: str, cwd: Path) -> Iterator[Row]:
    """Yield the rows of a split; no prompt is in both, or, where all rows have the same one, no answer.

    Held out is what the environment evaluates on, or one prompt in 16 where it evaluates on all that it
    trains on, or on nothing. These are in an order of chance, the same for ever: an environment may have its
    rows in order, and an eval takes the first ones. Raises SpecError.
    """
    rows = described(env, cwd).rows
    if len(rows) < 2:
        problem = f"{env.name} has {len(rows)} rows, and a run needs two"
        raise SpecError(problem, key="env.args", hint="Have it make more, by its arguments.")
    keys = [msgspec.json.encode(row.prompt) for row in rows]
    if len({*keys}) == 1:  # a game, which begins alike whatever is hidden
        keys = [msgspec.json.encode(row.answer) for row in rows]
    if len({*keys}) == 1:
        keys = [msgspec.json.encode(row) for row in rows]
    digests = [hashlib.sha256(key).digest() for key in keys]
    held_out = {digest for digest, row in zip(digests, rows, strict=True) if row.is_held_out}
    has_own = bool(held_out) and not held_out.issuperset(digests)
    if not has_own:
        held_out = {digest for digest in digests if digest[0] % _HELD_OUT == 0} or {min(digests)}
    is_test = split == "test"
    chosen = [
        (digest, number, row)
        for number, (digest, row) in enumerate(zip(digests, rows, strict=True), 1)
        if (digest in held_out) == is_test and row.is_held_out == (has_own and is_test)
    ]
    if is_test and not has_own:
        chosen.sort(key=lambda each: each[:2])
    for _, number, row in chosen:
        yield Row(number, f"{env.name}:{number}", msgspec.to_builtins(row))
