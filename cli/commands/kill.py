"""lorad kill RUN."""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson, Run, Wait
from lorad.cli.over import ask

app = typer.Typer(add_completion=False)


@app.command()
def kill(run: Run, wait: Wait = False, as_json: AsJson = False) -> None:
    """End a run at once; a resume starts at its last checkpoint."""
    ask(run, "kill", wait=wait, as_json=as_json)
