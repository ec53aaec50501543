"""lorad checkpoints RUN: what it can be resumed from."""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson, Run
from lorad.cli.output import age, print_json, print_table, size
from lorad.cli.table import Column
from lorad.client.client import Client

app = typer.Typer(add_completion=False)
CHECKPOINTS = ("step", "version", Column("size", 1), Column("age", 2), Column("path", kind="whole"))


@app.command()
def checkpoints(run: Run, as_json: AsJson = False) -> None:
    """List checkpoints, oldest first."""
    rows = Client().checkpoints(run)
    if as_json:
        print_json(rows)
        return
    cells = [(c.step, f"@{c.version}", size(c.bytes), age(c.created_at), c.path) for c in rows]
    print_table(CHECKPOINTS, cells, empty="No checkpoints yet.")
