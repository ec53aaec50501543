"""lorad tui: the dashboard."""

from __future__ import annotations

import typer

from lorad.cli.launch import connected

app = typer.Typer(add_completion=False)


@app.command()
def tui() -> None:
    """Watch and control runs in the terminal."""
    client = connected()
    from lorad.tui.app import LoradApp

    LoradApp(client).run()
