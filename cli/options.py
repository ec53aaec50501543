"""Arguments and options that several verbs share."""

from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.errors import SpecError

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's name.", show_default=False, autocompletion=candidates.runs),
]
Version = Annotated[
    str,
    typer.Argument(
        metavar="RUN@N",
        help="Or an alias, or a run: its current version.",
        show_default=False,
        autocompletion=candidates.versions,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Start it and return.")]
WaitOver = Annotated[bool, typer.Option("--wait", help="Return when it is over (also with --json).")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is over.")]


def refuse_both(detach: bool, wait: bool) -> None:
    """Raises SpecError."""
    if detach and wait:
        raise SpecError("--detach returns at once and --wait at the end", hint="Give one of the two.")
