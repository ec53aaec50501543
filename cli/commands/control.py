"""The commands pause, stop, kill and rm, which end runs for a while or for good, and wait, which waits."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from lorad.cli import many, output
from lorad.cli.options import AsJson, Wait, Yes
from lorad.cli.selecting import chooses_runs
from lorad.client.client import Client
from lorad.client.words import phase
from lorad.errors import Conflict
from lorad.records.runs import Run
from lorad.selection import Selection, seconds_in

_ENDABLE = ("queued", "starting", "running", "stopping", "paused")
_FINISHES = "it finishes its step and writes a checkpoint"


@chooses_runs
def pause(
    meant: Selection,
    wait: Wait = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Finish the step, write a checkpoint, and keep the runs for `lorad resume`.

    Of several, named or found by globs and filters, it shows a list and asks first.
    """
    client = Client()
    verb = _verb("pause", client.pause, f"is pausing: {_FINISHES}", ("queued", "starting", "running"))
    _end(client, verb, meant, wait=wait, yes=yes, as_json=as_json)


@chooses_runs
def stop(
    meant: Selection,
    wait: Wait = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Finish the step, write a checkpoint, and end the runs (they can still be resumed).

    Of several, named or found by globs and filters, it shows a list and asks first: `lorad stop 'sweep-*'`.
    """
    client = Client()
    verb = _verb("stop", client.stop, f"is stopping: {_FINISHES}", _ENDABLE)
    _end(client, verb, meant, wait=wait, yes=yes, as_json=as_json)


@chooses_runs
def kill(
    meant: Selection,
    wait: Wait = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """End runs at once; a resume starts at the last checkpoint.

    Of several, named or found by globs and filters, it shows a list and asks first: `lorad kill --owner me`.
    """
    client = Client()
    verb = _verb("kill", client.kill, "is being killed", _ENDABLE)
    _end(client, verb, meant, wait=wait, yes=yes, as_json=as_json)


@chooses_runs
def wait(
    meant: Selection,
    until: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="CONDITION",
            help="Until a step or an evaluation has this: 'eval>0.9', 'loss<0.1', 'step>=20'.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(help="At most so long: 90s, 30m, 2h.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until runs are over, or until each has a figure; it prints a line for each when it is so.

    The exit code is 1 where a run failed, ended without the figure, or took too long. Runs that pause are
    over.
    """
    from lorad.api.connection import DaemonConnection
    from lorad.api.waiting import wait as wait_for
    from lorad.api.waiting import where
    from lorad.client.conditions import condition

    many.only_run(meant)  # it refuses to wait for all that there is
    expected = condition(until) if until else None
    seconds = seconds_in("--timeout", timeout)
    client = Client()
    connection = DaemonConnection(client, start=True)
    begun = time.monotonic()

    def waited(name: str) -> Run:
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - begun))
        return wait_for(connection, name, until=expected, timeout=left)

    has = f" has {expected} and" if expected else ""
    verb = many.BulkVerb("wait for", waited, lambda run: f"{run.name}{has} is {where(run)}.", "")
    names = [run.name for run in many.chosen(client, meant, verb)]
    many.conclude(verb, many.each(verb, names, quiet=as_json), as_json=as_json)


def _verb(name: str, does: Callable[[str], Run], stopping: str, states: Sequence[str]) -> many.BulkVerb:
    """Make a verb that ends runs.

    stopping: what a run is said to do until it is over.
    states: the states of runs that it may be asked of.
    """

    def says(run: Any) -> str:
        return f"{run.name} {stopping}." if run.state == "stopping" else many.state_in_words(run)

    return many.BulkVerb(name, does, says, f"{name.capitalize()} {{}}?", lambda run: run.state in states)


def _end(
    client: Client, verb: many.BulkVerb, meant: Selection, *, wait: bool, yes: bool, as_json: bool
) -> None:
    """Ask the daemon, and with `wait` wait until the runs are over."""
    if name := many.only_run(meant):
        from lorad.cli.follow import watched  # slow, and rarely needed

        run = verb.does(name)
        if wait and isinstance(run, Run) and run.state not in many.OVER:
            if not as_json:
                output.note(verb.says(run))
            over = watched(client, name, as_json=as_json, does="stops all the same")
            if over is None:
                raise typer.Exit(130)
            run = over
        output.note_or_json(run, verb.says(run), as_json=as_json)
        if getattr(run, "reason", None) not in many.GOOD:
            raise typer.Exit(1)
        return
    outcomes = many.on_runs(client, verb, meant, yes=yes, quiet=wait or as_json)
    if wait:
        outcomes = many.awaited(client, verb, outcomes, quiet=as_json)
    many.conclude(verb, outcomes, as_json=as_json)


@chooses_runs
def rm(
    meant: Selection,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete runs with their versions, checkpoints, samples and logs.

    Of several, named or found by globs and filters, it shows a list first:
    `lorad rm --state failed --older 7d`.
    """
    client = Client()
    if name := many.only_run(meant):
        data = client.show(name)
        if data.state not in many.OVER:
            hint = f"`lorad kill {name}` ends it at once, `lorad stop {name}` after this step."
            raise Conflict(f"{name} is {phase(data)}: only a run that is over can be deleted", hint=hint)
        if not yes and not sys.stdin.isatty():
            raise Conflict(f"{name} is deleted only with --yes when nobody can be asked")
        if not yes:
            question = output.printable(f"Delete {name} and everything in {data.directory}?")
            typer.confirm(question, abort=True, err=True)
        output.note_or_json(client.remove(name), f"{name} is deleted.", as_json=as_json)
        return
    verb = many.BulkVerb(
        "delete",
        client.remove,
        lambda answer: f"{answer.name} is deleted.",
        "Delete {} with all versions, checkpoints, samples and logs?",
        lambda run: run.state in many.OVER,
    )
    outcomes = many.on_runs(client, verb, meant, yes=yes, quiet=as_json)
    many.conclude(verb, outcomes, as_json=as_json)
