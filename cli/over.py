"""pause, stop and kill: ask the daemon, and wait for the run to be over if told to."""

from __future__ import annotations

import time
from typing import Literal

import typer

from lorad.cli.output import note, print_json
from lorad.client import Client


def ask(name: str, verb: Literal["pause", "stop", "kill"], *, wait: bool, as_json: bool) -> None:
    client = Client()
    run = getattr(client, verb)(name)
    while wait and run["state"] not in ("ended", "paused"):
        time.sleep(0.1)
        run = client.show(name)
    if as_json:
        print_json(run)
    else:
        note(f"{name} is {run['state']}" + (f" ({run['reason']})." if run.get("reason") else "."))
    if run.get("reason") not in (None, "completed", "stopped", "killed"):
        raise typer.Exit(1)
