"""The verbs of the line, each with its arguments; those of `lorad` have the same names and order."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial

from lorad.client.boxes.hosts import ALL
from lorad.client.client import Client
from lorad.errors import NotFound, SpecError
from lorad.states import RunState
from lorad.tui.actions import ACTIONS, Action
from lorad.tui.palette import plans
from lorad.tui.palette.plans import FILTERS, Do, Go, Plan
from lorad.tui.palette.words import Given, given, split
from lorad.tui.watch import LOCAL, names

TABS = ("curves", "samples", "versions", "checkpoints", "logs", "spec", "events", "why")
_LIVE = frozenset(str(state) for state in RunState if not state.is_over)


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
    plan: Callable[[Client, Given], Plan]
    flags: Mapping[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()


def _of_runs(verb: str, left_out: frozenset[str] | None = None) -> PaletteVerb:
    action = ACTIONS[verb]
    out = action.over_when if left_out is None else left_out
    more = " [key=value…]" if action.fields else ""
    takes = ("run", "run or key") if action.fields else ("run",)
    return PaletteVerb(
        verb,
        f"{verb} RUN…|GLOB|--state …{more}",
        action.says,
        takes,
        lambda client, typed: plans.on_runs(action, client, typed, out),
        {**FILTERS, **_flags(action)},
        out,
    )


def _flags(action: Action) -> dict[str, str]:
    return {field.flag: "step" if field.flag == "--from" else "" for field in action.fields if field.flag}


def _of_one_run(
    action: Action, usage: str, takes: tuple[str, ...], of: Callable[[Given], dict[str, str]]
) -> PaletteVerb:
    return PaletteVerb(
        action.verb,
        f"{action.verb} RUN {usage}",
        action.says,
        ("run", *takes),
        lambda client, typed: plans.on_run(action, client, typed, of(typed)),
    )


def _command(verb: str) -> Callable[[str, Mapping[str, str]], str]:
    return lambda run, values: f"lorad {verb} {shlex.quote(run)} {values['words']}"


_PRIORITY = Action(
    "priority",
    "run",
    "Let a queued run start before or after others",
    lambda client, run, values: client.edit(run, [f"resources.priority={values['priority']}"]),
    lambda run, values: f"lorad edit {shlex.quote(run)} resources.priority={values['priority']}",
    lambda run, row: f"{run} is {row.state}, with priority {row.priority}.",
)
_EDIT = Action(
    "edit",
    "run",
    "Change what a queued run asks for",
    lambda client, run, values: client.edit(run, shlex.split(values["words"])),
    _command("edit"),
    lambda run, row: f"{run} is {row.state}, with priority {row.priority}.",
)
_TAG = Action(
    "tag",
    "run",
    "Add tags to a run, or take -TAG off it",
    lambda client, run, values: client.label(
        run,
        add=[word.removeprefix("+") for word in shlex.split(values["words"]) if not word.startswith("-")],
        remove=[word[1:] for word in shlex.split(values["words"]) if word.startswith("-")],
    ),
    _command("tag"),
    lambda run, row: f"{run}: {' '.join(row.tags) or 'no tags'}.",
)
_NOTE = Action(
    "note",
    "run",
    "Write a sentence of yours on a run",
    lambda client, run, values: client.label(run, note=shlex.split(values["words"])[0]),
    _command("note"),
    lambda run, row: f"{run}: {row.note or 'no note'}",
)
_RENAME = Action(
    "rename",
    "run",
    "Give a run another name",
    lambda client, run, values: client.rename(run, values["words"]),
    _command("rename"),
    lambda run, row: f"{run} is {row.name} now.",
)


def _priority(typed: Given) -> dict[str, str]:
    value = plans.first(typed, "priority", 1)
    if not value.removeprefix("-").isdecimal():
        raise SpecError(f"{value} is no priority", hint="It is a whole number: the highest starts first.")
    return {"priority": value}


def _edit(typed: Given) -> dict[str, str]:
    if not typed.overrides:
        raise SpecError("nothing to change was named", hint="Type key=value, as in resources.priority=5.")
    return {"words": shlex.join(typed.overrides)}


def _tags(typed: Given) -> dict[str, str]:
    plans.first(typed, "tag", 1)
    return {"words": shlex.join(typed.arguments[1:])}


def _note(typed: Given) -> dict[str, str]:
    plans.first(typed, "note", 1)
    return {"words": shlex.quote(" ".join(typed.arguments[1:]))}


def _swap(client: Client, typed: Given) -> Do:
    alias = plans.first(typed, "alias")
    version = plans.first(typed, "version", 1)
    return Do(ACTIONS["swap"], [version], {"alias": alias})


def _pool(client: Client, name: str) -> str:
    """Return the name of a pool that there is. Raises NotFound for another one."""
    pools = [pool.pool for pool in client.pools()]
    if name not in pools:
        hint = f"There are: {', '.join(pools)}." if pools else "None runs."
        raise NotFound(f"no pool named {name}", hint=hint)
    return name


def _on_versions(action: Action, client: Client, typed: Given) -> Do:
    plans.first(typed, "version")
    return Do(action, typed.names)


def _on_alias(action: Action, client: Client, typed: Given) -> Do:
    return Do(action, [plans.first(typed, "alias")])


# -- ways to screens -----------------------------------------------------------------------------------------
def _open(client: Client, typed: Given) -> Go:
    """Open a run, a tab of it, a pool or a device."""
    if typed.names[:1] == ["pool"] and len(typed.names) > 1:
        pool = _pool(client, typed.names[1])
        return Go(lambda app: app.open("pool", pool))
    if typed.names[:1] == ["device"] and len(typed.names) > 1:
        device = typed.names[1]
        devices = [each.device for each in client.devices()]
        if device not in devices:
            raise NotFound(f"no device named {device}", hint=f"There are: {', '.join(devices)}.")
        return Go(lambda app: app.open("device", device))
    run = plans.the_run(client, typed).name
    tab = typed.names[1] if len(typed.names) > 1 else ""
    if tab and tab not in TABS:
        raise SpecError(f"a run has no tab {tab}", hint=f"Its tabs are {', '.join(TABS)}.")
    return Go(lambda app: app.open_run(run, tab=tab))


def _show(tab: str, client: Client, typed: Given) -> Go:
    run = plans.the_run(client, typed).name
    return Go(lambda app: app.open_run(run, tab=tab))


def _new(client: Client, typed: Given) -> Go:
    like = plans.the_run(client, typed).name if typed.names else None
    return Go(lambda app: app.open("form", like))


def _theme(client: Client, typed: Given) -> Go:
    name = plans.first(typed, "theme")
    return Go(lambda app: app.use_theme(name))


def _box(client: Client, typed: Given) -> Go:
    name = plans.first(typed, "box")
    if name == ALL:
        return Go(lambda app: app.open("all"))
    if name != LOCAL and not name.startswith("ssh://") and name not in names():
        raise NotFound(f"there is no box {name}", hint=f"There are: {', '.join([LOCAL, *names()[1:]])}.")
    return Go(lambda app: app.show_box(name))


_VERBS = (
    _of_runs("pause"),
    _of_runs("resume"),
    _of_runs("stop"),
    _of_runs("kill"),
    _of_runs("rm", _LIVE),
    _of_one_run(_PRIORITY, "N", ("",), _priority),
    _of_one_run(_EDIT, "key=value…", ("key",), _edit),
    _of_one_run(_TAG, "TAG|-TAG…", ("tag",), _tags),
    _of_one_run(_NOTE, "TEXT", ("",), _note),
    _of_one_run(_RENAME, "NAME", ("",), lambda typed: {"words": plans.first(typed, "new name", 1)}),
    PaletteVerb(
        "fork",
        "fork RUN@N [key=value…]",
        ACTIONS["fork"].says,
        ("version", "key"),
        lambda client, typed: plans.on_version(ACTIONS["fork"], typed),
        _flags(ACTIONS["fork"]),
    ),
    *(
        PaletteVerb(
            verb,
            f"{verb} RUN@N…",
            ACTIONS[verb].says,
            ("version",),
            partial(_on_versions, ACTIONS[verb]),
        )
        for verb in ("pin", "unpin")
    ),
    PaletteVerb("swap", "swap ALIAS RUN@N", "Serve a version under an alias", ("alias", "version"), _swap),
    PaletteVerb(
        "rollback",
        "rollback ALIAS",
        ACTIONS["rollback"].says,
        ("alias",),
        partial(_on_alias, ACTIONS["rollback"]),
    ),
    PaletteVerb(
        "unalias", "unalias ALIAS", "Remove an alias", ("alias",), partial(_on_alias, ACTIONS["unalias"])
    ),
    PaletteVerb(
        "export",
        "export RUN@N DIR",
        ACTIONS["export"].says,
        ("version", ""),
        lambda client, typed: plans.on_version(
            ACTIONS["export"], typed, directory=plans.first(typed, "directory", 1)
        ),
    ),
    PaletteVerb(
        "end",
        "end POOL",
        ACTIONS["end"].says,
        ("pool",),
        lambda client, typed: Do(ACTIONS["end"], [_pool(client, plans.first(typed, "pool"))]),
    ),
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
    PaletteVerb(
        "bill",
        "bill",
        "Show who used how much",
        (),
        lambda client, typed: Go(lambda app: app.open("bill")),
    ),
    PaletteVerb(
        "nodes",
        "nodes",
        "Show the nodes of a cluster",
        (),
        lambda client, typed: Go(lambda app: app.open("nodes")),
    ),
    PaletteVerb(
        "boxes",
        "boxes",
        "Show which boxes answer, and what is free there",
        (),
        lambda client, typed: Go(lambda app: app.open("boxes")),
    ),
    PaletteVerb(
        "box",
        "box NAME|local|all",
        "Show another box, this machine again, or the runs of all",
        ("box",),
        _box,
    ),
    PaletteVerb(
        "serving",
        "serving",
        "Show aliases, traffic, a chat",
        (),
        lambda client, typed: Go(lambda app: app.open("serving")),
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
    words = split(line)
    if not words:
        return None
    word = words[0]
    if (verb := VERBS.get(SHORT.get(word, word))) is None:
        near = [name for name in VERBS if name.startswith(word)] or get_close_matches(word, VERBS)
        hint = f"Did you mean {' or '.join(near)}?" if near else "An empty line lists all commands."
        raise SpecError(f"there is no command {word}", hint=hint)
    return verb.plan(client, given(verb.name, words[1:], verb.flags))
