"""Arguments and options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name.", show_default=False)]
Version = Annotated[
    str, typer.Argument(metavar="RUN@N", help="Or an alias, or a run: its current version.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is over.")]
