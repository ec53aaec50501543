"""lorad fork RUN@12: start a new run from a version of another one."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.cli.follow import follow
from lorad.cli.launch import connected
from lorad.cli.options import AsJson, Detach, WaitOver, refuse_both
from lorad.cli.output import note, print_json
from lorad.cli.overrides import from_here
from lorad.cli.result import conclude

app = typer.Typer(add_completion=False)


@app.command()
def fork(
    version: Annotated[
        str,
        typer.Argument(
            metavar="RUN@N",
            help="A run's name alone means its current version.",
            show_default=False,
            autocompletion=candidates.versions,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]…",
            help="Any key of the spec but the model and the adapter's shape.",
            autocompletion=candidates.overrides,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The new run's name; default: RUN-fork.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps of its own; default: RUN's trainer.steps.", min=1)
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Take only the weights; Adam starts from zero.")
    ] = False,
    detach: Detach = False,
    wait: WaitOver = False,
    as_json: AsJson = False,
) -> None:
    """Start a new run with the weights and the optimizer's state of a checkpointed version. RUN may continue
    meanwhile.

    Steps, data and learning rate start over:
    `lorad fork sorter@40 trainer.lr=1e-5 data.train=hard.jsonl --steps 100`.
    """
    refuse_both(detach, wait)
    client = connected()
    forked = client.fork(version, overrides=from_here(overrides or []), name=name, steps=steps, fresh=fresh)
    for warning in forked.warnings:
        note(f"warning: {warning}")
    if detach or (as_json and not wait):
        print_json(forked) if as_json else note(f"{forked.name} is {forked.state}.")
        return
    conclude(follow(client, forked.name, quiet=as_json), as_json=as_json)
