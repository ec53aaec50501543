"""lorad logs RUN: what its processes print."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.cli.options import AsJson, Run
from lorad.cli.output import print_json, printable
from lorad.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over or Ctrl-C.")] = False,
    of: Annotated[
        str,
        typer.Option(help="driver, trainer or engine.", autocompletion=candidates.words("driver", "trainer", "engine")),
    ] = "driver",
    as_json: AsJson = False,
) -> None:
    """The end of a log; -f follows it."""
    client = Client()
    part = client.logs(run, of=of)
    if as_json:
        print_json(part)
        return
    while True:
        sys.stdout.write(printable(part["text"]))
        sys.stdout.flush()
        if not follow or (not part["text"] and client.show(run)["state"] in ("ended", "paused")):
            return
        time.sleep(0 if part["text"] else 0.3)
        part = client.logs(run, of=of, offset=part["offset"])
