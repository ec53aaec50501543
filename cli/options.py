"""Arguments and options that several verbs share."""

from typing import Annotated

import typer

from lorad.cli import candidates

Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A YAML file, or - for stdin.",
        show_default=False,
        autocompletion=candidates.specs,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]…",
        help="Any key of the spec: trainer.lr=3e-5",
        autocompletion=candidates.overrides,
    ),
]
Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's name.", show_default=False, autocompletion=candidates.runs),
]
Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]…",
        help="Names, or globs in quotes: 'sweep-*'.",
        show_default=False,
        autocompletion=candidates.runs,
    ),
]
States = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        help="Of these states (running) or with these ends (failed); with commas.",
        show_default=False,
        autocompletion=candidates.states,
    ),
]
Owners = Annotated[
    list[str] | None,
    typer.Option("--owner", help="Of these users; me.", show_default=False, autocompletion=candidates.owners),
]
Sweeps = Annotated[
    list[str] | None,
    typer.Option("--sweep", help="Of these sweeps.", show_default=False, autocompletion=candidates.sweeps),
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", help="With one of these tags.", show_default=False, autocompletion=candidates.tags),
]
Bases = Annotated[
    list[str] | None,
    typer.Option(
        "--base",
        help="On these base models: whole, or the last part of the path.",
        show_default=False,
        autocompletion=candidates.run_bases,
    ),
]
Older = Annotated[
    str | None,
    typer.Option(help="Ended (or made, where it has not) at least so long ago: 7d.", show_default=False),
]
Newer = Annotated[
    str | None,
    typer.Option(help="Ended (or made, where it has not) at most so long ago: 12h.", show_default=False),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Version = Annotated[
    str,
    typer.Argument(
        metavar="RUN@N",
        help="Or RUN@step:80, RUN@best, an alias, or a run: its current version.",
        show_default=False,
        autocompletion=candidates.versions,
    ),
]
Versions = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN@N…",
        help="Or RUN@step:80, RUN@best, aliases, runs (their current versions); 'sweep-*@best', 'RUN@*'.",
        show_default=False,
        autocompletion=candidates.versions,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no completions while it is followed.")]
Silent = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show on a terminal what is waited for.")]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Start it and return; with --wait, as soon as it works.")
]
WaitOver = Annotated[bool, typer.Option("--wait", help="Return when it is over (also with --json).")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is over, and show how far it is.")]
