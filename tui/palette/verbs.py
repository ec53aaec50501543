"""The verbs of the line, each with its arguments; those of `lorad` have the same names and order."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial

from lorad.client.boxes.hosts import ALL
from lorad.client.client import Client
from lorad.errors import NotFound, SpecError
from lorad.tui.actions.action import VerbAction
from lorad.tui.actions.table import SCREENS
from lorad.tui.actions.verbs import VERBS as ACTING
from lorad.tui.palette import plans
from lorad.tui.palette.plans import FILTERS, Go, Plan, TypedWords, parsed, without_lorad
from lorad.tui.watch import LOCAL, names

TABS = ("curves", "samples", "versions", "checkpoints", "logs", "spec", "events", "why")


@dataclass(frozen=True)
class PaletteVerb:
    """A verb of the line.

    Attributes:
        takes: What each argument is, in words of `candidates.Source`; the last one may come again.
        flags: What each option is completed with.
        left_out: The states of runs that a glob or filter leaves out, and that are not offered.
    """

    name: str
    usage: str
    says: str
    takes: tuple[str, ...]
    plan: Callable[[Client, TypedWords], Plan]
    flags: Mapping[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()


def _of(verb: VerbAction) -> PaletteVerb:
    completed = {field.key: field.takes for field in verb.fields} | {verb.on: verb.on}
    takes = tuple(completed[place] for place in verb.places)
    flags = {field.flag: field.takes for field in verb.fields if field.flag}
    usage = f"{verb.name} {verb.usage}"
    if "GLOB" not in verb.usage:
        return PaletteVerb(verb.name, usage, verb.says, takes, partial(plans.on_named, verb), flags)
    takes = ("run", "run or key") if "key" in takes else ("run",)
    verb = replace(verb, left_out=verb.over_when | verb.left_out)
    plan = partial(plans.on_runs, verb)
    return PaletteVerb(verb.name, usage, verb.says, takes, plan, {**FILTERS, **flags}, verb.left_out)


# -- ways to screens -----------------------------------------------------------------------------------------
def _open(client: Client, typed: TypedWords) -> Go:
    if typed.names[:1] == ["pool"] and len(typed.names) > 1:
        pool = plans.the_pool(client, typed.names[1])
        return Go(lambda app: app.open("pool", pool))
    if typed.names[:1] == ["device"] and len(typed.names) > 1:
        device = typed.names[1]
        devices = [each.device for each in client.devices()]
        if device not in devices:
            raise NotFound(f"no device named {device}", hint=f"There are: {', '.join(devices)}.")
        return Go(lambda app: app.open("device", device))
    tab = "".join(typed.names[1:2])
    way = _show(tab, client, typed)
    if tab and tab not in TABS:
        raise SpecError(f"a run has no tab {tab}", hint=f"Its tabs are {', '.join(TABS)}.")
    return way


def _show(tab: str, client: Client, typed: TypedWords) -> Go:
    run = plans.the_run(client, plans.first(typed.names, "run")).name
    return Go(lambda app: app.open_run(run, tab=tab))


def _screen(name: str, client: Client, typed: TypedWords) -> Go:
    return Go(lambda app: app.open(name))


def _new(client: Client, typed: TypedWords) -> Go:
    like = plans.the_run(client, plans.first(typed.names, "run")).name if typed.names else None
    return Go(lambda app: app.open("form", like))


def _theme(client: Client, typed: TypedWords) -> Go:
    name = plans.first(typed.names, "theme")
    return Go(lambda app: app.use_theme(name))


def _box(client: Client, typed: TypedWords) -> Go:
    name = plans.first(typed.names, "box")
    if name == ALL:
        return Go(lambda app: app.open("all"))
    if name != LOCAL and not name.startswith("ssh://") and name not in names():
        raise NotFound(f"there is no box {name}", hint=f"There are: {', '.join([LOCAL, *names()[1:]])}.")
    return Go(lambda app: app.show_box(name))


_VERBS = (
    *(_of(verb) for verb in ACTING.values() if verb.usage),
    PaletteVerb(
        "open",
        "open RUN [TAB] | open pool POOL | open device DEVICE",
        "Show a run, a pool or a device",
        ("run or pool or device", "tab or pool or device"),
        _open,
    ),
    *(
        PaletteVerb(tab, f"{tab} RUN", f"Show the {tab} of a run", ("run",), partial(_show, tab))
        for tab in TABS
    ),
    PaletteVerb(
        "runs",
        "runs [WORDS, state: owner: base: pool: alarm:]",
        "Show the runs that a filter wants",
        ("",),
        lambda client, typed: Go(lambda app: app.narrow(" ".join(typed.arguments))),
    ),
    *(
        PaletteVerb(name, name, SCREENS[name].says, (), partial(_screen, name))
        for name in ("bill", "nodes", "boxes", "serving")
    ),
    PaletteVerb(
        "box",
        "box NAME|local|all",
        "Show another box, this machine again, or the runs of all",
        ("box",),
        _box,
    ),
    PaletteVerb("new", "new [RUN]", "Start a new run from a form, or like another", ("run",), _new),
    PaletteVerb("theme", "theme NAME", "Change the colours", ("theme",), _theme),
    PaletteVerb("quit", "quit", "Leave; runs continue", (), lambda client, typed: Go(lambda app: app.exit())),
)
VERBS = {verb.name: verb for verb in _VERBS}
SHORT = {
    "q": "quit",
    "aliases": "serving",
    "list": "runs",
    "show": "open",
    "plot": "curves",
    "adapters": "versions",
}
"""Other names of verbs, those of `lorad` and of editors."""


def read(client: Client, line: str) -> Plan | None:
    """Say what a line comes to; None for an empty one. Raises LoradError, before anything is done."""
    try:
        words = without_lorad(shlex.split(line))
    except ValueError as error:
        hint = f"Close it, or put a backslash before it ({error})."
        raise SpecError("a quote is not closed", hint=hint) from None
    if not words:
        return None
    word = words[0]
    if (verb := VERBS.get(SHORT.get(word, word))) is None:
        near = [name for name in VERBS if name.startswith(word)] or get_close_matches(word, VERBS)
        hint = f"Did you mean {' or '.join(near)}?" if near else "An empty line lists all commands."
        raise SpecError(f"there is no command {word}", hint=hint)
    return verb.plan(client, parsed(verb.name, words[1:], verb.flags))
