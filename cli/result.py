"""Reports how a followed run ended: a sentence, JSON, an exit code."""

from __future__ import annotations

import typer

from lorad.cli.output import note, number, print_json
from lorad.client.shapes import Run
from lorad.client.words import failures

GOOD = ("completed", "stopped")


def conclude(run: Run | None, *, as_json: bool) -> None:
    """Exit 1 unless the run ended as it should; `run` is None when the user detached."""
    if run is None:
        return
    if as_json:
        print_json(run)
    else:
        note(sentence(run))
    if run.state == "ended" and run.reason not in GOOD:
        raise typer.Exit(1)


def sentence(run: Run) -> str:
    name, where = run.name, f"step {run.step} of {run.steps}"
    if run.state == "paused":
        return f"{name} is paused at {where}; `lorad resume {name}` continues."
    evals = ""
    if run.eval_first is not None:
        evals = f"; held-out eval {number(run.eval_first)} -> {number(run.eval_last) or '-'}"
    detail = f": {run.detail}" if run.detail and run.reason not in GOOD else ""
    failed = f"; {failures(run)}" if failures(run) else ""
    return f"{name} ended ({run.reason}) at {where}{evals}{failed}{detail}"
