"""lorad stop RUN."""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson, Run, Wait
from lorad.cli.over import ask

app = typer.Typer(add_completion=False)


@app.command()
def stop(run: Run, wait: Wait = False, as_json: AsJson = False) -> None:
    """Finish the step, write a checkpoint, and end the run (it can still be resumed)."""
    ask(run, "stop", wait=wait, as_json=as_json)
