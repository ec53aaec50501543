"""The verbs: what is asked of the daemon about a run, a version, an alias or a pool."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import Struct

from lorad.client.client import Client
from lorad.client.words import phase
from lorad.files import expanded
from lorad.records.runs import Run
from lorad.records.versions import Swapped
from lorad.tui.actions import consequences
from lorad.tui.actions.action import Field, Values, VerbAction


def _whole(least: int) -> Callable[[str], str]:
    """Make a check that allows nothing, or a whole number."""

    def check(value: str) -> str:
        if not value.strip() or (value.strip().isdecimal() and int(value) >= least):
            return ""
        return f"a whole number from {least} on"

    return check


def _signed(value: str) -> str:
    is_number = value.removeprefix("-").isdecimal()
    return "" if is_number else f"{value} is no whole number; the highest starts first"


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


def _resume(client: Client, run: str, values: Values) -> Struct:
    start = values.get("from", "").strip()
    steps = values.get("steps", "").strip()
    return client.resume(
        run,
        step=int(start) if start else None,
        steps=int(steps) if steps else None,
        overrides=shlex.split(values.get("overrides", "")),
    )


def _fork(client: Client, version: str, values: Values) -> Struct:
    steps = values.get("steps", "").strip()
    return client.fork(
        version,
        overrides=shlex.split(values.get("overrides", "")),
        name=values.get("name", "").strip() or None,
        steps=int(steps) if steps else None,
        fresh=False,
    )


def _label(client: Client, run: str, values: Values) -> Struct:
    """Add tags to a run, and remove those behind a minus."""
    words = shlex.split(values["tags"])
    return client.label(
        run,
        add=[word.removeprefix("+") for word in words if not word.startswith("-")],
        remove=[word[1:] for word in words if word.startswith("-")],
    )


def _serves(_target: str, row: Swapped) -> str:
    before = f", before {row.previous}" if row.previous else ""
    return f"{row.alias} serves {row.run}@{row.version}{before} ({row.attestation.verdict})."


def _verb(
    id: str, keys: str, says: str, request: Callable[[Client, str, Values], Struct], **more: Any
) -> VerbAction:
    """Make a verb that is called as its id says, here and by `lorad`, if nothing else is given."""
    on, _, name = id.partition(".")
    name = more.setdefault("name", name)
    more = {
        "label": name.capitalize(),
        "footer": "shown",
        "cli": f"{name} {{{on}}}",
        "done": lambda target, row: f"{target} is {phase(row) if isinstance(row, Run) else row.state}.",
    } | more
    return VerbAction(id, keys, does=f"screen.act('{name}')", says=says, on=on, request=request, **more)


_OVERRIDES = Field("overrides", "settings", says="key=value …, from now on", check=settings, takes="key")
_STEPS = Field("steps", "steps", "--steps", "the new total; empty: as before", _whole(1))
_LIVE = frozenset(["queued", "starting", "running", "stopping"])
_ENDED = frozenset(["ended"])
_OVER = frozenset(["stopping", "paused", "ended"])
_RUNS = "RUN…|GLOB|--state …"
RUNS = (
    _verb(
        "run.pause",
        "P",
        "Finish the step, write a checkpoint and wait",
        lambda client, run, _: client.pause(run),
        usage=_RUNS,
        over_when=_OVER,
    ),
    _verb(
        "run.resume",
        "r",
        "Start from a checkpoint",
        _resume,
        cli="resume {run} --detach",
        usage=f"{_RUNS} [key=value…]",
        fields=(
            Field("from", "from step", "--from", "a checkpoint's; empty: the newest", _whole(0), "step"),
            _STEPS,
            _OVERRIDES,
        ),
        lost=consequences.of_resume,
        many=True,
        over_when=_LIVE,
    ),
    _verb(
        "run.stop",
        "s",
        "Finish the step, write a checkpoint and end",
        lambda client, run, _: client.stop(run),
        usage=_RUNS,
        lost=consequences.of_stop,
        over_when=_ENDED,
    ),
    _verb(
        "run.kill",
        "x",
        "End it at once",
        lambda client, run, _: client.kill(run),
        footer="kept",
        usage=_RUNS,
        lost=consequences.of_kill,
        over_when=_ENDED,
    ),
    _verb(
        "run.rm",
        "ctrl+d",
        "Delete it with its versions, checkpoints, samples and logs",
        lambda client, run, _: client.remove(run),
        label="Delete",
        footer="",
        usage=_RUNS,
        done=lambda run, _: f"{run} is deleted.",
        lost=consequences.of_rm,
        left_out=_LIVE,
    ),
)
TYPED = (  # only in the line
    _verb(
        "run.priority",
        "",
        "Let a queued run start before or after others",
        lambda client, run, values: client.edit(run, [f"resources.priority={values['priority']}"]),
        cli="edit {run} resources.priority={priority}",
        usage="RUN N",
        fields=(Field("priority", "priority", check=_signed),),
        done=lambda run, row: f"{run} is {row.state}, with priority {row.priority}.",
    ),
    _verb(
        "run.edit",
        "",
        "Change what a queued run asks for",
        lambda client, run, values: client.edit(run, shlex.split(values["overrides"])),
        usage="RUN key=value…",
        fields=(replace(_OVERRIDES, says="key=value, as in resources.priority=5", check=needed),),
        done=lambda run, row: f"{run} is {row.state}, with priority {row.priority}.",
    ),
    _verb(
        "run.tag",
        "",
        "Add tags to a run, or take -TAG off it",
        _label,
        usage="RUN TAG|-TAG…",
        fields=(Field("tags", "tag", takes="tag"),),
        done=lambda run, row: f"{run}: {' '.join(row.tags) or 'no tags'}.",
    ),
    _verb(
        "run.note",
        "",
        "Write a sentence of yours on a run",
        lambda client, run, values: client.label(run, note=values["note"]),
        cli="note {run} {note}",
        usage="RUN TEXT",
        fields=(Field("note", "note"),),
        done=lambda run, row: f"{run}: {row.note or 'no note'}",
    ),
    _verb(
        "run.rename",
        "",
        "Give a run another name",
        lambda client, run, values: client.rename(run, values["name"]),
        usage="RUN NAME",
        fields=(Field("name", "new name"),),
        done=lambda run, row: f"{run} is {row.name} now.",
    ),
)
VERSIONS = (
    _verb(
        "version.pin",
        "i",
        "Keep it loaded, and safe from deletion",
        lambda client, version, _: client.pin(version),
        usage="RUN@N…",
        done=lambda version, _: f"{version} is pinned.",
    ),
    _verb(
        "version.unpin",
        "u",
        "Let it go when nothing asks for it",
        lambda client, version, _: client.unpin(version),
        usage="RUN@N…",
        done=lambda version, _: f"{version} is not pinned.",
        lost=consequences.of_unpin,
    ),
    _verb(
        "version.swap",
        "w",
        "Serve it under an alias",
        lambda client, version, values: client.swap(values["alias"].strip(), version),
        cli="swap {alias} {version}",
        usage="ALIAS RUN@N",
        fields=(Field("alias", "alias", "", "made if there is none", needed, "alias", "ALIAS"),),
        done=_serves,
        of_others=True,
    ),
    _verb(
        "version.fork",
        "f",
        "Start a new run from it",
        _fork,
        cli="fork {version} --detach",
        usage="RUN@N [key=value…]",
        fields=(
            Field("name", "name", "--name", "name of the new run; empty: RUN-fork"),
            replace(_STEPS, says="its own steps; empty: as its parent"),
            _OVERRIDES,
        ),
        done=lambda version, row: f"{row.name} is {row.state}.",
        of_others=True,
    ),
    _verb(
        "version.export",
        "e",
        "Copy it, verified, as a PEFT directory",
        lambda client, version, values: client.export(
            version, str(expanded(values["directory"].strip()).absolute())
        ),
        footer="",
        cli="export {version} {directory}",
        usage="RUN@N DIR",
        fields=(Field("directory", "directory", "", "a new directory for PEFT files", needed, "", "DIR"),),
        done=lambda version, row: f"{version} is in {row.path}.",
        of_others=True,
    ),
)
ALIASES = (
    _verb(
        "alias.move",
        "w",
        "Serve another version under it",
        lambda client, alias, values: client.swap(alias, values["version"].strip()),
        label="Swap",
        cli="swap {alias} {version}",
        fields=(Field("version", "version", "", "run@12, or another alias", needed, "", "RUN@N"),),
        done=_serves,
    ),
    _verb(
        "alias.rollback",
        "b",
        "Serve the version before this one",
        lambda client, alias, _: client.swap(alias, rollback=True),
        label="Roll back",
        cli="swap {alias} --rollback",
        usage="ALIAS",
        done=_serves,
        lost=consequences.of_rollback,
    ),
    _verb(
        "alias.rm",
        "ctrl+d",
        "Remove the alias",
        lambda client, alias, _: client.remove_alias(alias),
        label="Remove",
        name="unalias",
        cli="aliases --remove {alias}",
        usage="ALIAS",
        done=lambda alias, _: f"{alias} is removed.",
        lost=consequences.of_unalias,
    ),
)
POOLS = (
    _verb(
        "pool.end",
        "E",
        "End it, and free its devices",
        lambda client, pool, _: client.stop_pool(pool),
        footer="",
        cli="pools stop {pool}",
        usage="POOL",
        lost=consequences.of_end,
    ),
)
VERBS = {row.name: row for row in (*RUNS, *TYPED, *VERSIONS, *ALIASES, *POOLS)}
