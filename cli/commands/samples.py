"""lorad samples RUN: what the model wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli.options import AsJson, Run
from lorad.cli.output import number, print_json, print_table
from lorad.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def samples(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Default: the last step.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="At most so many.")] = 24,
    as_json: AsJson = False,
) -> None:
    """Prompts and completions of a step, with their reward and advantage."""
    rows = Client().samples(run, step=step, limit=limit)
    if as_json:
        print_json(rows)
        return
    cells = [
        (
            s["step"],
            repr(s["prompt"])[1:-1],
            repr(s["completion"])[1:-1],
            s["answer"],
            number(s["reward"], 2),
            number(s["advantage"], 2),
            s["error"] or s["finish"],
        )
        for s in rows
    ]
    print_table(
        ("step", "prompt", "completion", "answer", "reward", "advantage", "end"), cells, empty="No samples yet."
    )
