"""lorad swap ALIAS RUN@12: serve another version."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.cli.launch import connected
from lorad.cli.options import AsJson
from lorad.cli.output import note, print_json, tell_address

app = typer.Typer(add_completion=False)


@app.command()
def swap(
    alias: Annotated[
        str,
        typer.Argument(
            metavar="ALIAS",
            help="Made if there is none.",
            show_default=False,
            autocompletion=candidates.aliases,
        ),
    ],
    version: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN@N]",
            help="Or another alias, or a run.",
            show_default=False,
            autocompletion=candidates.versions,
        ),
    ] = None,
    rollback: Annotated[
        bool,
        typer.Option("--rollback", help="Go back to the version before this one; a second time undoes that."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Move an alias to a version that is loaded and attested first; what cannot be served changes nothing."""
    row = connected().swap(alias, version, rollback=rollback)
    if as_json:
        print_json(row)
        return
    before = f", before {row.previous}" if row.previous else ""
    verdict = row.attestation.verdict
    note(f"{alias} serves {row.run}@{row.version}{before} ({verdict}, {row.seconds:.2f} s).")
    tell_address(row, alias)
