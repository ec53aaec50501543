"""The actions: the request, the command that does the same, the questions before it, and the message about
its result.

Every action of the interface is defined here; a screen binds keys to `act('verb')` and says what it would act
on.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from lorad.client.client import Client
from lorad.client.words import phase
from lorad.files import expanded
from lorad.records.pools import Pool
from lorad.records.runs import Run
from lorad.records.versions import Swapped
from lorad.tui import consequences

_Values = Mapping[str, str]  # what was typed, by field; "" where nothing was


@dataclass(frozen=True)
class Field:
    """A text that an action asks for.

    Attributes:
        flag: The command's flag for it; "" where it is an argument.
        check: Says what is wrong with a value, or "".
    """

    key: str
    label: str
    flag: str = ""
    says: str = ""
    check: Callable[[str], str] = lambda value: ""


@dataclass(frozen=True)
class Action:
    """An action that keys, palette and help offer.

    Attributes:
        on: The kind of thing that it acts on: `run`, `version`, `alias` or `pool`.
        says: What it does, for help and palette.
        fields: What is asked for first.
        lost: Says what will be lost, for the user to agree to; "" if nothing is, then nothing is asked. It
            runs on a thread.
        done: Says what was done.
        many: The same input can hold for several things at once.
        of_others: Whoever may see a thing may do it.
        over_when: The states of a run in which nothing is left to do.
    """

    verb: str
    on: str
    says: str
    request: Callable[[Client, str, _Values], Struct]
    line: Callable[[str, _Values], str]
    done: Callable[[str, Any], str]
    fields: tuple[Field, ...] = ()
    lost: Callable[[Client, str, _Values], str] | None = None
    many: bool = False
    of_others: bool = False
    over_when: frozenset[str] = frozenset()

    def command(self, target: str, values: _Values | None = None) -> str:
        """Return the line to type in a shell."""
        return self.line(target, values or {})


def _command(*words: str, fields: tuple[Field, ...] = (), values: _Values | None = None) -> str:
    """Write a command line: `lorad`, the words and what was typed, quoted where a shell needs it."""
    parts = ["lorad", *map(shlex.quote, words)]
    for field in fields:
        value = (values or {}).get(field.key, "").strip()
        if value and field.flag:
            parts += [field.flag, shlex.quote(value)]
        elif value:
            parts += map(shlex.quote, shlex.split(value))
    return " ".join(parts)


def _whole(least: int) -> Callable[[str], str]:
    """Make a check that allows nothing, or a whole number."""

    def check(value: str) -> str:
        if not value.strip() or (value.strip().isdecimal() and int(value) >= least):
            return ""
        return f"a whole number from {least} on"

    return check


def needed(value: str) -> str:
    return "" if value.strip() else "is needed"


def settings(value: str) -> str:
    """Check words of key=value, with keys and values of a spec."""
    try:
        words = shlex.split(value)
    except ValueError:
        return "has a quote that is not closed"
    wrong = [word for word in words if "=" not in word]
    from lorad.tui.draft import wrong_settings  # which reads YAML: not needed to show a screen

    return f"{wrong[0]} is not key=value" if wrong else wrong_settings(words)


def _number(value: str | None) -> int | None:
    return int(value) if value and value.strip() else None


def _is_now(target: str, row: Run | Pool) -> str:
    return f"{target} is {phase(row) if isinstance(row, Run) else row.state}."


_OVERRIDES = Field("overrides", "settings", says="key=value …, from now on", check=settings)
_RESUME = (
    Field("from", "from step", "--from", "a checkpoint's; empty: the newest", _whole(0)),
    Field("steps", "steps", "--steps", "the new total; empty: as before", _whole(1)),
    _OVERRIDES,
)
_FORK = (
    Field("name", "name", "--name", "name of the new run; empty: RUN-fork"),
    Field("steps", "steps", "--steps", "its own steps; empty: as its parent", _whole(1)),
    _OVERRIDES,
)
_ALIAS = (Field("alias", "alias", says="made if there is none", check=needed),)
_VERSION = (Field("version", "version", says="run@12, or another alias", check=needed),)
_DIRECTORY = (Field("directory", "directory", says="a new directory for PEFT files", check=needed),)


def _plain(verb: str, on: str, says: str, request: Callable[[Client, str], Struct], **more: Any) -> Action:
    """Make an action that needs no input."""
    more.setdefault("line", lambda target, values: _command(verb, target))
    more.setdefault("done", _is_now)
    return Action(verb, on, says, lambda client, target, values: request(client, target), **more)


def _resume(client: Client, run: str, values: _Values) -> Struct:
    start = _number(values.get("from"))
    steps = _number(values.get("steps"))
    return client.resume(run, step=start, steps=steps, overrides=shlex.split(values.get("overrides", "")))


def _fork(client: Client, version: str, values: _Values) -> Struct:
    overrides = shlex.split(values.get("overrides", ""))
    steps = _number(values.get("steps"))
    name = values.get("name", "").strip() or None
    return client.fork(version, overrides=overrides, name=name, steps=steps, fresh=False)


def _serves(_target: str, row: Swapped) -> str:
    before = f", before {row.previous}" if row.previous else ""
    return f"{row.alias} serves {row.run}@{row.version}{before} ({row.attestation.verdict})."


_LIVE = frozenset(["queued", "starting", "running", "stopping"])
_ENDED = frozenset(["ended"])
_OVER = frozenset(["stopping", "paused", "ended"])
RUNS = (
    _plain(
        "pause",
        "run",
        "Finish the step, write a checkpoint and wait",
        lambda client, run: client.pause(run),
        over_when=_OVER,
    ),
    Action(
        "resume",
        "run",
        "Start from a checkpoint",
        _resume,
        lambda run, values: _command("resume", run, "--detach", fields=_RESUME, values=values),
        _is_now,
        fields=_RESUME,
        lost=consequences.of_resume,
        many=True,
        over_when=_LIVE,
    ),
    _plain(
        "stop",
        "run",
        "Finish the step, write a checkpoint and end",
        lambda client, run: client.stop(run),
        lost=consequences.of_stop,
        over_when=_ENDED,
    ),
    _plain(
        "kill",
        "run",
        "End it at once",
        lambda client, run: client.kill(run),
        lost=consequences.of_kill,
        over_when=_ENDED,
    ),
    _plain(
        "rm",
        "run",
        "Delete it with its versions, checkpoints, samples and logs",
        lambda client, run: client.remove(run),
        done=lambda run, row: f"{run} is deleted.",
        lost=consequences.of_rm,
    ),
)
VERSIONS = (
    _plain(
        "pin",
        "version",
        "Keep it loaded, and safe from deletion",
        lambda client, version: client.pin(version),
        done=lambda version, row: f"{version} is pinned.",
    ),
    _plain(
        "unpin",
        "version",
        "Let it go when nothing asks for it",
        lambda client, version: client.unpin(version),
        done=lambda version, row: f"{version} is not pinned.",
        lost=consequences.of_unpin,
    ),
    Action(
        "swap",
        "version",
        "Serve it under an alias",
        lambda client, version, values: client.swap(values["alias"].strip(), version),
        lambda version, values: _command("swap", values.get("alias", "").strip() or "ALIAS", version),
        _serves,
        fields=_ALIAS,
        of_others=True,
    ),
    Action(
        "fork",
        "version",
        "Start a new run from it",
        _fork,
        lambda version, values: _command("fork", version, "--detach", fields=_FORK, values=values),
        lambda version, row: f"{row.name} is {row.state}.",
        fields=_FORK,
        of_others=True,
    ),
    Action(
        "export",
        "version",
        "Copy it, verified, as a PEFT directory",
        lambda client, version, values: client.export(
            version, str(expanded(values["directory"].strip()).absolute())
        ),
        lambda version, values: _command("export", version, values.get("directory", "").strip() or "DIR"),
        lambda version, row: f"{version} is in {row.path}.",
        fields=_DIRECTORY,
        of_others=True,
    ),
)
ALIASES = (
    Action(
        "move",
        "alias",
        "Serve another version under it",
        lambda client, alias, values: client.swap(alias, values["version"].strip()),
        lambda alias, values: _command("swap", alias, values.get("version", "").strip() or "RUN@N"),
        _serves,
        fields=_VERSION,
    ),
    _plain(
        "rollback",
        "alias",
        "Serve the version before this one",
        lambda client, alias: client.swap(alias, rollback=True),
        line=lambda alias, values: _command("swap", alias, "--rollback"),
        done=_serves,
        lost=consequences.of_rollback,
    ),
    _plain(
        "unalias",
        "alias",
        "Remove it",
        lambda client, alias: client.remove_alias(alias),
        line=lambda alias, values: _command("aliases", "--remove", alias),
        done=lambda alias, row: f"{alias} is removed.",
        lost=consequences.of_unalias,
    ),
)
POOLS = (
    _plain(
        "end",
        "pool",
        "End it, and free its devices",
        lambda client, pool: client.stop_pool(pool),
        line=lambda pool, values: _command("pools", "stop", pool),
        lost=consequences.of_end,
    ),
)
ACTIONS = {action.verb: action for action in (*RUNS, *VERSIONS, *ALIASES, *POOLS)}
