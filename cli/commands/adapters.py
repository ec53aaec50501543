"""lorad adapters [RUN]: versions."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.cli.options import AsJson
from lorad.cli.output import age, print_json, print_table
from lorad.cli.table import Column
from lorad.client.client import Client

app = typer.Typer(add_completion=False)
VERSIONS = (
    *(
        "version",
        Column("step", 3),
        Column("sha256", 6),
        Column("rank", 7),
        Column("alpha", 8),
        Column("held", 2),
    ),
    *(Column("loaded", 4), Column("attested", 1), Column("age", 5), Column("path", 9, "whole")),
)


@app.command()
def adapters(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Only this run's.", show_default=False, autocompletion=candidates.runs
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List versions, oldest first, with their files, hashes, users and attestation."""
    versions = Client().adapters(run)
    if as_json:
        print_json(versions)
        return
    rows = [
        (
            f"{v.run}@{v.version}",
            v.step,
            v.sha256[:12],
            v.rank,
            f"{v.alpha:g}",
            ", ".join(["pinned"] * v.pinned + v.aliases),
            "yes" if v.loaded else "",
            v.attested,
            age(v.created_at),
            v.path or "(files pruned)",
        )
        for v in versions
    ]
    print_table(VERSIONS, rows, empty="No versions yet.")
