"""lorad pin RUN@12: keep a version."""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson, Version
from lorad.cli.output import note, print_json
from lorad.client.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def pin(version: Version, as_json: AsJson = False) -> None:
    """Keep a version's files, and keep it loaded while the pool of its base is up."""
    row = Client().pin(version)
    print_json(row) if as_json else note(f"{row.run}@{row.version} is pinned.")
