"""lorad adapters [RUN]: versions."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli.options import AsJson
from lorad.cli.output import age, print_json, print_table
from lorad.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def adapters(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Only this run's.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Versions, oldest first: where they are, what they hash to, who needs them, whether they are attested."""
    versions = Client().adapters(run)
    if as_json:
        print_json(versions)
        return
    columns = ("version", "step", "sha256", "rank", "alpha", "held", "loaded", "attested", "age", "path")
    rows = [
        (
            f"{v['run']}@{v['version']}",
            v["step"],
            v["sha256"][:12],
            v["rank"],
            f"{v['alpha']:g}",
            ", ".join(["pinned"] * v["pinned"] + v["aliases"]),
            "yes" if v["loaded"] else "",
            v["attested"],
            age(v["created_at"]),
            v["path"] or "(files pruned)",
        )
        for v in versions
    ]
    print_table(columns, rows, empty="No versions yet.")
