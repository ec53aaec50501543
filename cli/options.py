"""Arguments and options that several verbs share."""

from typing import Annotated

import typer

from lorad.cli import candidates

Spec = Annotated[
    str, typer.Argument(metavar="SPEC", help="A YAML file, or - for stdin.", autocompletion=candidates.specs)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]…",
        help="Any key of the spec: trainer.lr=3e-5",
        autocompletion=candidates.overrides,
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name.", autocompletion=candidates.runs)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Version = Annotated[
    str,
    typer.Argument(
        metavar="RUN@N",
        help="Or RUN@step:80, RUN@best, an alias, or a run: its current version.",
        autocompletion=candidates.versions,
    ),
]
Versions = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN@N…",
        help="Or RUN@step:80, RUN@best, aliases, runs (their current versions); 'sweep-*@best', 'RUN@*'.",
        autocompletion=candidates.versions,
    ),
]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Repeat every 2 seconds, until Ctrl-C.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no completions while it is followed.")]
Silent = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show on a terminal what is waited for.")]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Start it and return; with --wait, as soon as it works.")
]
WaitOver = Annotated[bool, typer.Option("--wait", help="Return when it is over (also with --json).")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is over, and show how far it is.")]
