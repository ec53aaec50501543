"""A typed line: its words, and what they come to: an action on some things, or a way to a screen."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lorad.client.client import Client
from lorad.client.selected import refuse_everything, selected
from lorad.errors import Conflict, NotFound, SpecError
from lorad.records.runs import Run
from lorad.selection import selection
from lorad.tui.actions.action import VerbAction
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


# -- words ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TypedWords:
    """What was typed behind a verb. flags: the values of each option."""

    arguments: Sequence[str] = ()
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def flag(self, name: str) -> str:
        """Return the last value of an option, "" where there is none."""
        return self.flags.get(name, [""])[-1]

    @property
    def names(self) -> list[str]:
        return [word for word in self.arguments if "=" not in word]

    @property
    def overrides(self) -> list[str]:
        return [word for word in self.arguments if "=" in word]


def without_lorad(words: list[str]) -> list[str]:
    """Leave out `lorad` before a line, which is not needed."""
    return words[1:] if words[:1] == ["lorad"] else words


def parsed(verb: str, words: Sequence[str], flags: Collection[str]) -> TypedWords:
    """Tell options from arguments. Raises SpecError for an unknown option, or one without a value."""
    arguments: list[str] = []
    options: dict[str, list[str]] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--") or len(word) == 2:
            arguments.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in flags:
            hint = f"It has {', '.join(sorted(flags))}." if flags else "It has none."
            raise SpecError(f"{verb} has no option {name}", hint=hint)
        if not equals and not left:
            raise SpecError(f"{name} needs a value", hint=f"Type it behind {name}, after a space.")
        options.setdefault(name, []).append(value if equals else left.pop(0))
    return TypedWords(arguments, options)


# -- plans ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Do:
    """A verb on targets. owners: the owners by target, as far as they are known."""

    verb: VerbAction
    targets: Sequence[str]
    values: Mapping[str, str] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Go:
    """A way to a screen, once the line is closed."""

    go: Callable[[AppPort], object]


Plan = Do | Go


def on_runs(verb: VerbAction, client: Client, typed: TypedWords) -> Do:
    """Plan what is done to the runs that names, globs and filters mean; these leave out `verb.left_out`.

    Raises NotFound, SpecError, Conflict.
    """
    words = {name.removeprefix("--"): typed.flags.get(name) for name in FILTERS}
    ages = {name: typed.flag(f"--{name}") or None for name in ("older", "newer")}
    meant = selection({**words, **ages, "runs": typed.names})
    refuse_everything(meant)
    runs = selected(client, meant)
    chosen = [run for run in runs if run.name in meant.names or run.state not in verb.left_out]
    if not chosen:
        others = f"{len(runs)} in another state were left out." if runs else "No run fits all of it."
        raise Conflict(f"there is nothing to {verb.name}", hint=others)
    owners = {run.name: run.owner for run in chosen}
    return Do(verb, [run.name for run in chosen], _values(verb, typed, []), owners)


def on_named(verb: VerbAction, client: Client, typed: TypedWords) -> Do:
    """Plan what is done to the thing that is named, or to several versions. Raises NotFound, SpecError."""
    takes_settings = any(field.key == "overrides" for field in verb.fields)
    words = [*(typed.names if takes_settings else typed.arguments)]
    labels = {field.key: field.label for field in verb.fields}
    for at, place in enumerate(verb.places):
        if place != "overrides":
            first(words, labels.get(place, place), at)
    if verb.usage.endswith("RUN@N…"):
        return Do(verb, words)
    name = words.pop(verb.places.index(verb.on))
    values = _values(verb, typed, words)
    if verb.on == "run":
        run = the_run(client, name)
        return Do(verb, [run.name], values, {run.name: run.owner})
    return Do(verb, [the_pool(client, name) if verb.on == "pool" else name], values)


def the_run(client: Client, name: str) -> Run:
    """Find a run. Raises NotFound."""
    if not (runs := client.named([name])):
        raise NotFound(f"no run named {name}", hint="Tab completes the names of runs.")
    return runs[0]


def the_pool(client: Client, name: str) -> str:
    """Return the name of a pool that there is. Raises NotFound for another one."""
    pools = [pool.pool for pool in client.pools()]
    if name not in pools:
        hint = f"There are: {', '.join(pools)}." if pools else "None runs."
        raise NotFound(f"no pool named {name}", hint=hint)
    return name


def first(words: Sequence[str], what: str, at: int = 0) -> str:
    """Return an argument. Raises SpecError where it is missing."""
    if len(words) <= at:
        raise SpecError(f"the {what} is missing", hint="Tab completes it; the line above shows the order.")
    return words[at]


def _values(verb: VerbAction, typed: TypedWords, words: list[str]) -> dict[str, str]:
    """Return what the fields of a verb hold; the last one without a flag has all further words.

    Raises SpecError for one that is wrong.
    """
    values = {}
    for each in verb.fields:
        if each.key == "overrides":
            value = shlex.join(typed.overrides)
        elif each.flag:
            value = typed.flag(each.flag)
        else:
            is_text = f"{{{each.key}}}" in verb.cli
            value = " ".join(words) if is_text else shlex.join(words)
        if wrong := each.check(value):
            raise SpecError(f"{each.label}: {wrong}", hint=f"It is {each.says}." if each.says else "")
        values[each.key] = value
    if verb.on == "run" and not verb.fields and typed.overrides:
        raise SpecError(f"{verb.name} takes no key=value", hint=f"Leave out {typed.overrides[0]}.")
    return values
