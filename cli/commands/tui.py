"""lorad tui: the dashboard."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli.launch import connected

app = typer.Typer(add_completion=False)


@app.command()
def tui(
    readonly: Annotated[bool, typer.Option("--readonly", help="Only look: every action is refused.")] = False,
) -> None:
    """Watch and control runs in the terminal."""
    client = connected()
    from lorad.tui.app import LoradApp

    LoradApp(client, readonly=readonly).run()
