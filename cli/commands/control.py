"""The commands pause, stop, kill and rm, which end runs for a while or for good, and wait, which waits."""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
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

_PAUSABLE = ("queued", "starting", "running")
_ENDABLE = (*_PAUSABLE, "stopping", "paused")
_FINISHES = "it finishes its step and writes a checkpoint"


@chooses_runs
def pause(meant: Selection, wait: Wait = False, yes: Yes = False, as_json: AsJson = False) -> None:
    """Finish the step, write a checkpoint, and keep the runs for `lorad resume`.

    Of several, named or found by globs and filters, it shows a list and asks first.
    """
    _end(meant, Client.pause, f"is pausing: {_FINISHES}", _PAUSABLE, wait=wait, yes=yes, as_json=as_json)


@chooses_runs
def stop(meant: Selection, wait: Wait = False, yes: Yes = False, as_json: AsJson = False) -> None:
    """Finish the step, write a checkpoint, and end the runs (they can still be resumed).

    Of several, named or found by globs and filters, it shows a list and asks first: `lorad stop 'sweep-*'`.
    """
    _end(meant, Client.stop, f"is stopping: {_FINISHES}", _ENDABLE, wait=wait, yes=yes, as_json=as_json)


@chooses_runs
def kill(meant: Selection, wait: Wait = False, yes: Yes = False, as_json: AsJson = False) -> None:
    """End runs at once; a resume starts at the last checkpoint.

    Of several, named or found by globs and filters, it shows a list and asks first: `lorad kill --owner me`.
    """
    _end(meant, Client.kill, "is being killed", _ENDABLE, wait=wait, yes=yes, as_json=as_json)


@chooses_runs
def wait(
    meant: Selection,
    until: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="CONDITION",
            help="Until a step or an evaluation has this: 'eval>0.9', 'loss<0.1', 'step>=20'.",
        ),
    ] = None,
    timeout: Annotated[str | None, typer.Option(help="At most so long: 90s, 30m, 2h.")] = None,
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
    names = [run.name for run in many.choose_runs(client, meant, verb)]
    many.conclude(verb, many.do_each(verb, names, quiet=as_json), as_json=as_json)


def _end(
    meant: Selection,
    does: Callable[[Client, str], Run],
    stopping: str,
    states: Sequence[str],
    *,
    wait: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Ask the daemon to end runs, and with `wait` wait until they are over.

    does: the method of the client, which is called as the command is.
    stopping: what a run is said to do until it is over.
    states: the states of runs that can be ended so.
    """

    def says(run: Any) -> str:
        return f"{run.name} {stopping}." if run.state == "stopping" else many.state_in_words(run)

    client = Client()
    asks = f"{does.__name__.capitalize()} {{}}?"
    verb = many.BulkVerb(does.__name__, partial(does, client), says, asks, lambda run: run.state in states)
    if name := many.only_run(meant):
        from lorad.cli.follow import watched  # slow, and rarely needed

        run = does(client, name)
        if wait and run.state not in many.OVER:
            if not as_json:
                output.note(verb.says(run))
            over = watched(client, name, as_json=as_json, does="stops all the same")
            if over is None:
                raise typer.Exit(130)
            run = over
        output.note_or_json(run, verb.says(run), as_json=as_json)
        if run.reason not in many.GOOD:
            raise typer.Exit(1)
        return
    outcomes = many.on_runs(client, verb, meant, yes=yes, quiet=wait or as_json)
    if wait:
        outcomes = many.await_runs(client, verb, outcomes, quiet=as_json)
    many.conclude(verb, outcomes, as_json=as_json)


@chooses_runs
def rm(meant: Selection, yes: Yes = False, as_json: AsJson = False) -> None:
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
