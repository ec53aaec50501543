"""A verb for several runs or versions: which they are, a question first, and what came of each."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import typer
from msgspec import Struct

from lorad.cli import output
from lorad.client.client import Client
from lorad.client.columns import cell
from lorad.client.selected import refuse_everything, selected
from lorad.client.words import phase
from lorad.errors import Conflict, DaemonUnreachable, LoradError, SpecError, to_wire
from lorad.records.runs import Run
from lorad.selection import Selection, is_glob
from lorad.text import counted

OVER = ("ended", "paused")
GOOD = (None, "completed", "stopped", "killed")  # reasons for which a run may end
_LISTED = 20  # runs that a question names
_PERIOD = 0.1  # seconds between looks
_ABOUT = ("name", "state", "step", "owner", "age")


class BulkVerb(NamedTuple):
    """A command that does the same to each of several runs or versions.

    name: the verb as it is typed.
    does: asks the daemon to do it to the run or version of a name.
    says: tells in a line what came of it.
    asks: the question before it is done, with `{}` for the runs or versions.
    fits: tells whether a run is in a state in which it can be done.
    """

    name: str
    does: Callable[[str], Struct]
    says: Callable[[Any], str]
    asks: str
    fits: Callable[[Run], bool] = lambda run: True


class _BulkOutcome(NamedTuple):
    """The daemon's answer about one run or version, or its error."""

    name: str
    answer: Struct | None
    error: LoradError | None


def only_run(selection: Selection) -> str | None:
    """Return the run that is meant by its name and nothing else; None for any other selection.

    Raises SpecError where the selection says nothing.
    """
    refuse_everything(selection)
    is_alone = len(selection.names) == 1 and selection == Selection(names=selection.names)
    return selection.names[0] if is_alone and not is_glob(selection.names[0]) else None


def on_runs(
    client: Client, verb: BulkVerb, meant: Selection, *, yes: bool, quiet: bool
) -> list[_BulkOutcome]:
    """Find the runs that are meant, ask, and do it to each; `quiet` says nothing of each."""
    runs = choose_runs(client, meant, verb)
    if not runs:
        output.note(f"There is nothing to {verb.name}.")
        return []
    lines = [[cell(run, column) for column in _ABOUT] for run in runs]
    ask(verb, counted(len(runs), "run"), lines, yes=yes)
    return do_each(verb, [run.name for run in runs], quiet=quiet)


def choose_runs(client: Client, selection: Selection, verb: BulkVerb) -> list[Run]:
    """Find the runs that are meant and that the verb fits; the ones that were named whatever their state.

    Raises NotFound for a name or glob that no run has.
    """
    runs = selected(client, selection)
    kept = [run for run in runs if run.name in selection.names or verb.fits(run)]
    if others := len(runs) - len(kept):
        unfit = counted(others, "run")
        output.note(f"Left out: {unfit} in a state in which there is nothing to {verb.name}.")
    return kept


def ask(verb: BulkVerb, what: str, lines: Sequence[Sequence[str]], *, yes: bool) -> None:
    """List what the verb is about, and ask, unless `yes`.

    Raises typer.Abort; SpecError where nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        hint = "Add --yes, once `lorad list` or `lorad adapters` has shown that they are the right ones."
        raise SpecError(f"nobody can be asked whether to {verb.name} {what}", hint=hint)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines[:_LISTED]:
        output.note("  " + "  ".join(map(str.ljust, line, widths)).rstrip())
    if len(lines) > _LISTED:
        output.note(f"  and {len(lines) - _LISTED} more")
    typer.confirm(output.printable(verb.asks.format(what)), abort=True, err=True)


def do_each(verb: BulkVerb, names: Iterable[str], *, quiet: bool = False) -> list[_BulkOutcome]:
    """Do it to one after the other, also where one fails, and say what came of each unless `quiet`.

    Raises DaemonUnreachable.
    """
    outcomes = []
    for name in names:
        try:
            outcome = _BulkOutcome(name, verb.does(name), None)
        except DaemonUnreachable:
            raise
        except LoradError as error:
            outcome = _BulkOutcome(name, None, error)
        outcomes.append(outcome)
        if not quiet:
            say(verb, outcome)
    return outcomes


def await_runs(
    client: Client, verb: BulkVerb, outcomes: list[_BulkOutcome], *, quiet: bool, until: Sequence[str] = OVER
) -> list[_BulkOutcome]:
    """Wait until the runs have one of the states `until`, and say how each is as soon as it has.

    On a terminal it also shows how many are done, and what the others do. A run that ended otherwise than it
    should has an error in the place of its answer.
    """
    is_seen = sys.stderr.isatty() and not quiet
    last = {outcome.name: outcome for outcome in outcomes}
    names = [outcome.name for outcome in outcomes if isinstance(outcome.answer, Run)]
    for outcome in outcomes:
        if outcome.name not in names and not quiet:
            say(verb, outcome)
    waiting = [*names]
    while waiting:
        runs = {run.name: run for run in client.select(Selection(names=waiting))}
        over = [name for name in waiting if name not in runs or runs[name].state in until]
        if is_seen:
            others = [run for name, run in runs.items() if name not in over]
            doing = ", ".join(f"{run.name}: {run.doing or phase(run)}" for run in others)
            output.doing("" if over else f"{len(names) - len(waiting)} of {len(names)} done; {doing}")
        for name in over:
            run = client.show(name)
            last[name] = _BulkOutcome(run.name, run, None)
            if run.reason not in GOOD:  # it ended otherwise than it should
                detail = f": {run.detail}" if run.detail else ""
                hint = f"See `lorad logs {run.name}`."
                error = Conflict(f"{run.name} ended ({run.reason}){detail}", hint=hint)
                last[name] = _BulkOutcome(run.name, None, error)
            if not quiet:
                say(verb, last[name])
        waiting = [name for name in waiting if name not in over]
        time.sleep(_PERIOD if waiting else 0)
    return [*last.values()]


def state_in_words(run: Any) -> str:
    """Say in which state a run is, of which any shape will do."""
    return f"{run.name} is {phase(run)}" + (f" ({run.reason})." if run.reason else ".")


def say(verb: BulkVerb, outcome: _BulkOutcome) -> None:
    if outcome.answer is not None:
        output.note(verb.says(outcome.answer))
    elif outcome.error is not None:
        is_named = outcome.name in outcome.error.message
        output.note(f"error: {'' if is_named else f'{outcome.name}: '}{outcome.error.message}")
        if outcome.error.hint:
            output.note(f"  {outcome.error.hint}")


def conclude(verb: BulkVerb, outcomes: Sequence[_BulkOutcome], *, as_json: bool) -> None:
    """Print the answers as JSON, an error in the place of one that has none, or how many failed.

    Raises typer.Exit where some failed: with the code that they have in common, else 1.
    """
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    if as_json:
        errors = {o.name: {"name": o.name, "error": to_wire(o.error)} for o in outcomes if o.error}
        output.print_json([errors.get(outcome.name, outcome.answer) for outcome in outcomes])
    elif failed:
        output.note(f"{len(failed)} of {len(outcomes)} failed to {verb.name}.")
    if failed:
        codes = {error.exit_code for error in failed}
        raise typer.Exit(codes.pop() if len(codes) == 1 else 1)
