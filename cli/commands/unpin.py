"""lorad unpin RUN@12: let a version go."""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson, Version
from lorad.cli.output import note, print_json
from lorad.client.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def unpin(version: Version, as_json: AsJson = False) -> None:
    """Remove a pin; an alias keeps its version without one."""
    row = Client().unpin(version)
    served = f", {', '.join(row.aliases)} still serves it" if row.aliases else ""
    print_json(row) if as_json else note(f"{row.run}@{row.version} is no longer pinned{served}.")
