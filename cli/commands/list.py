"""lorad list: runs, and why they wait. It imports little, so that it starts at once."""

import sys
import time
from typing import Annotated

import typer

from lorad.cli import output
from lorad.cli.options import AsJson
from lorad.client.client import Client
from lorad.client.shapes import Run

_SHOWN = 50  # of those that ended; whatever works or waits is shown in any case


def _show(client: Client, runs: list[Run], everything: bool, tags: bool) -> None:
    cut = not everything and len(runs) > _SHOWN and runs[-1].state == "ended"
    output.run_table(runs[:-1] if cut else runs, tags=tags)
    if cut:
        more = sum(client.status().runs.values()) - len(runs) + 1
        output.note(f"{more} older ones: `lorad list --all` shows every run.")


def _show_troubles(troubles: list[str]) -> None:
    """Print one line on stderr, where readers of the table see it and programs are not disturbed."""
    if troubles:
        more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
        print(
            output.printable(f"trouble: {troubles[0]}{more} `lorad doctor` lists all of it."), file=sys.stderr
        )


def list_(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show old ones too.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat every 2 seconds, until Ctrl-C.")
    ] = False,
    tags: Annotated[bool, typer.Option("--tags", help="Show tags and notes.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first, and why they wait."""
    client = Client()
    while True:
        runs = client.list(all=everything, limit=0 if everything or as_json else _SHOWN + 1)
        if watch and not as_json:
            print("\x1b[H\x1b[2J", end="")
        output.print_json(runs) if as_json else _show(client, runs, everything, tags)
        _show_troubles(client.status().troubles)
        if not watch:
            return
        time.sleep(2)
