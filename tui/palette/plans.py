"""What a typed line comes to: an action on some things, or a way to a screen."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lorad.client.client import Client
from lorad.client.selected import refuse_everything, selected
from lorad.errors import Conflict, NotFound, SpecError
from lorad.records.runs import Run
from lorad.selection import selection
from lorad.tui.actions import Action
from lorad.tui.palette.words import Given
from lorad.tui.port import AppPort

FILTERS = {
    "--state": "state",
    "--owner": "owner",
    "--sweep": "sweep",
    "--tag": "tag",
    "--base": "base",
    "--older": "",
    "--newer": "",
}
"""The options by which runs are chosen, and what each is completed with."""


@dataclass(frozen=True)
class Do:
    """An action on targets. owners: the owners by target, as far as they are known."""

    action: Action
    targets: Sequence[str]
    values: Mapping[str, str] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Go:
    """A way to a screen, once the line is closed."""

    go: Callable[[AppPort], object]


Plan = Do | Go


def on_runs(action: Action, client: Client, typed: Given, left_out: frozenset[str]) -> Do:
    """Plan an action on the runs that names, globs and filters mean.

    left_out: states of runs that a glob or a filter leaves out. Raises NotFound, SpecError, Conflict.
    """
    words = {name.removeprefix("--"): typed.flags.get(name) for name in FILTERS}
    ages = {name: typed.flag(f"--{name}") or None for name in ("older", "newer")}
    meant = selection({**words, **ages, "runs": typed.names})
    refuse_everything(meant)
    runs = selected(client, meant)
    kept = [run for run in runs if run.name in meant.names or run.state not in left_out]
    if not kept:
        others = f"{len(runs)} in another state were left out." if runs else "No run fits all of it."
        raise Conflict(f"there is nothing to {action.verb}", hint=others)
    owners = {run.name: run.owner for run in kept}
    return Do(action, [run.name for run in kept], _values(action, typed), owners)


def on_run(action: Action, client: Client, typed: Given, values: Mapping[str, str]) -> Do:
    """Plan an action on the one run that is named first."""
    run = the_run(client, typed)
    return Do(action, [run.name], values, {run.name: run.owner})


def the_run(client: Client, typed: Given) -> Run:
    """Find the run that is named first. Raises NotFound, SpecError."""
    name = first(typed, "run")
    if not (runs := client.named([name])):
        raise NotFound(f"no run named {name}", hint="Tab completes the names of runs.")
    return runs[0]


def first(typed: Given, what: str, at: int = 0) -> str:
    """Return an argument. Raises SpecError where it is missing."""
    if len(typed.names) <= at:
        raise SpecError(f"the {what} is missing", hint="Tab completes it; the line above shows the order.")
    return typed.names[at]


def on_version(action: Action, typed: Given, **values: str) -> Do:
    """Plan an action on the version that is named first."""
    return Do(action, [first(typed, "version")], {**_values(action, typed), **values})


def _values(action: Action, typed: Given) -> dict[str, str]:
    """Return what the fields of an action would hold. Raises SpecError for one that is wrong."""
    values = {}
    for each in action.fields:
        is_overrides = each.key == "overrides"
        values[each.key] = value = shlex.join(typed.overrides) if is_overrides else typed.flag(each.flag)
        if (each.flag or is_overrides) and (wrong := each.check(value)):
            raise SpecError(f"{each.label} {wrong}", hint="" if is_overrides else f"It is {each.says}.")
    if typed.overrides and "overrides" not in values:
        raise SpecError(f"{action.verb} takes no key=value", hint=f"Leave out {typed.overrides[0]}.")
    return values
