"""lorad gc: delete files that nothing can ask for."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli.options import AsJson
from lorad.cli.output import note, print_json, print_table, size
from lorad.cli.table import Column
from lorad.client.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what no run, pin, alias or checkpoint needs, by the `checkpoint` section of each run's spec."""
    answer = Client().gc(dry_run=dry_run)
    if as_json:
        print_json(answer)
        return
    rows = [(item.run, size(item.bytes), item.why, item.path) for item in answer.deleted]
    print_table(
        ("run", "size", Column("why", kind="fold"), Column("path", kind="whole")),
        rows,
        empty="There is nothing to delete.",
    )
    for held in answer.kept:
        note(f"{held.version} is kept: `lorad swap {held.alias} --rollback` goes back to it.")
    if rows:
        note(f"{size(answer.bytes)} {'would be' if dry_run else 'are'} free.")
