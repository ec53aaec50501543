"""lorad pause, stop, kill and rm: end a run, for a while or for good."""

import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

from lorad.cli import output
from lorad.cli.options import AsJson, Run, Wait
from lorad.client import shapes
from lorad.client.client import Client
from lorad.errors import Conflict


def pause(run: Run, wait: Wait = False, as_json: AsJson = False) -> None:
    """Finish the step, write a checkpoint, and keep the run for `lorad resume`."""
    stopping = "is pausing: it finishes its step and writes a checkpoint"
    _end(Client.pause, run, stopping, wait=wait, as_json=as_json)


def stop(run: Run, wait: Wait = False, as_json: AsJson = False) -> None:
    """Finish the step, write a checkpoint, and end the run (it can still be resumed)."""
    stopping = "is stopping: it finishes its step and writes a checkpoint"
    _end(Client.stop, run, stopping, wait=wait, as_json=as_json)


def kill(run: Run, wait: Wait = False, as_json: AsJson = False) -> None:
    """End a run at once; a resume starts at its last checkpoint."""
    _end(Client.kill, run, "is being killed", wait=wait, as_json=as_json)


def _end(
    verb: Callable[[Client, str], shapes.Run], name: str, stopping: str, *, wait: bool, as_json: bool
) -> None:
    """Ask the daemon, and with `wait` wait until the run is over. stopping: what the run does until then."""
    client = Client()
    run = verb(client, name)
    while wait and run.state not in ("ended", "paused"):
        time.sleep(0.1)
        run = client.show(name)
    if as_json:
        output.print_json(run)
    elif run.state == "stopping":
        output.note(f"{name} {stopping}.")
    else:
        output.note(f"{name} is {run.state}" + (f" ({run.reason})." if run.reason else "."))
    if run.reason not in (None, "completed", "stopped", "killed"):
        raise typer.Exit(1)


def rm(
    run: Run,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a run with its versions, checkpoints, samples and logs."""
    client = Client()
    data = client.show(run)
    if not yes:
        if not sys.stdin.isatty():
            raise Conflict(f"{run} is deleted only with --yes when nobody can be asked")
        typer.confirm(
            output.printable(f"Delete {run} and everything in {data.directory}?"), abort=True, err=True
        )
    answer = client.remove(run)
    output.print_json(answer) if as_json else output.note(f"{run} is deleted.")
