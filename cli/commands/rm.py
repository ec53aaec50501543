"""lorad rm RUN: delete a run that is over."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lorad.cli.options import AsJson, Run
from lorad.cli.output import note, print_json, printable
from lorad.client.client import Client
from lorad.errors import Conflict

app = typer.Typer(add_completion=False)


@app.command()
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
        typer.confirm(printable(f"Delete {run} and everything in {data.directory}?"), abort=True, err=True)
    answer = client.remove(run)
    print_json(answer) if as_json else note(f"{run} is deleted.")
