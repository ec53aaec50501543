"""lorad resume RUN: continue from a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.cli.follow import follow
from lorad.cli.launch import connected
from lorad.cli.options import AsJson, Detach, Run, WaitOver, refuse_both
from lorad.cli.output import note, print_json
from lorad.cli.overrides import from_here
from lorad.cli.result import conclude

app = typer.Typer(add_completion=False)


@app.command()
def resume(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]…",
            help="From now on: trainer.backend=fsdp trainer.dp=2, rollout.…, pool.…",
            autocompletion=candidates.overrides,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--from", help="A checkpoint's step; default: the newest.", autocompletion=candidates.steps
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="The new total of steps.", min=1)] = None,
    detach: Detach = False,
    wait: WaitOver = False,
    as_json: AsJson = False,
) -> None:
    """Continue exactly where a checkpoint left off. Facts after it are rewound; version numbers are not.

    The checkpoint fits every trainer and topology: `lorad resume RUN trainer.backend=megatron trainer.tp=2`.
    """
    refuse_both(detach, wait)
    client = connected()
    resumed = client.resume(run, step=step, steps=steps, overrides=from_here(overrides or []))
    for warning in (*resumed.warnings, *resumed.changed_inputs):
        note(f"warning: {warning}")
    if detach or (as_json and not wait):
        print_json(resumed) if as_json else note(f"{run} is {resumed.state}.")
        return
    conclude(follow(client, run, quiet=as_json), as_json=as_json)
