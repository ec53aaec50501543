"""lorad verify RUN: is all of it what it was?"""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson, Run
from lorad.cli.output import print_json, printable
from lorad.client.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def verify(run: Run, as_json: AsJson = False) -> None:
    """Hash the base, versions, checkpoints, samples and journal again, audit the run,
    attest what is loaded.
    """
    answer = Client(timeout=24 * 3600.0).verify(run)
    if as_json:
        print_json(answer)
    for check in [] if as_json else answer.checks:
        mark = "\N{BALLOT X}" if check.problems else "\N{CHECK MARK}"
        print(f"{mark} {printable(check.check):<12} {printable(check.looked_at)}")
        for problem in check.problems:
            print(f"    {printable(problem)}")
    if answer.problems:
        raise typer.Exit(1)
