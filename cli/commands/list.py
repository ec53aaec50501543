"""lorad list: runs, and why they wait."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from lorad.cli.options import AsJson
from lorad.cli.output import print_json, run_table
from lorad.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def list_(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Old ones too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every 2 seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Runs, newest first, and why they wait."""
    client = Client()
    while True:
        runs = client.list(all=everything)
        if watch and not as_json:
            print("\x1b[H\x1b[2J", end="")
        print_json(runs) if as_json else run_table(runs)
        if not watch:
            return
        time.sleep(2)
