"""pause, stop and kill: ask the daemon, and with --wait wait until the run is over."""

from __future__ import annotations

import time
from typing import Literal

import typer

from lorad.cli.output import note, print_json
from lorad.client.client import Client
from lorad.client.shapes import Run

COMING = {
    "pause": "is pausing: it finishes its step and writes a checkpoint",
    "stop": "is stopping: it finishes its step and writes a checkpoint",
    "kill": "is being killed",
}


def ask(name: str, verb: Literal["pause", "stop", "kill"], *, wait: bool, as_json: bool) -> None:
    client = Client()
    verbs = {"pause": client.pause, "stop": client.stop, "kill": client.kill}
    run = verbs[verb](name)
    while wait and run.state not in ("ended", "paused"):
        time.sleep(0.1)
        run = client.show(name)
    if as_json:
        print_json(run)
    else:
        note(in_words(name, verb, run))
    if run.reason not in (None, "completed", "stopped", "killed"):
        raise typer.Exit(1)


def in_words(name: str, verb: str, run: Run) -> str:
    if run.state == "stopping":
        return f"{name} {COMING[verb]}."
    return f"{name} is {run.state}" + (f" ({run.reason})." if run.reason else ".")
