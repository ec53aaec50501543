"""lorad pause RUN."""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson, Run, Wait
from lorad.cli.over import ask

app = typer.Typer(add_completion=False)


@app.command()
def pause(run: Run, wait: Wait = False, as_json: AsJson = False) -> None:
    """Finish the step, write a checkpoint, and keep the run for `lorad resume`."""
    ask(run, "pause", wait=wait, as_json=as_json)
