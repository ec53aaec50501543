"""lorad daemon start | stop | status | run."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from lorad.cli.launch import start as launch
from lorad.cli.options import AsJson
from lorad.cli.output import age, note, print_json
from lorad.client import Client
from lorad.errors import Conflict, DaemonUnreachable

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Start, stop, status of the daemon.")


@app.command()
def start(as_json: AsJson = False) -> None:
    """Start it in the background; nothing happens if it runs already."""
    client = Client()
    try:
        client.status()
    except DaemonUnreachable:
        launch(client)
    report(client, as_json)


@app.command()
def stop(
    gateway: Annotated[bool, typer.Option("--gateway", help="End the gateway as well.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask it to exit. Runs, pools and the gateway go on; the next daemon takes them over."""
    client = Client()
    pid = client.status()["pid"]
    client.shutdown(gateway=gateway)
    deadline = time.monotonic() + 10
    while _alive(client):
        if time.monotonic() > deadline:
            raise Conflict(
                f"the daemon (pid {pid}) still answers after 10 s", hint=f"Its log: {client.home.daemon_log}"
            )
        time.sleep(0.02)
    print_json({"stopped": pid}) if as_json else note(f"The daemon (pid {pid}) is stopped; runs go on.")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Whether it answers, and what it looks after."""
    report(Client(), as_json)


@app.command()
def run() -> None:
    """Run it in the foreground (for systemd, or to look at its log)."""
    os.execv(sys.executable, [sys.executable, "-m", "lorad.daemon"])


def report(client: Client, as_json: bool) -> None:
    data = client.status()
    if as_json:
        print_json(data)
        return
    runs = ", ".join(f"{count} {state}" for state, count in data["runs"].items() if count) or "no runs"
    note(f"The daemon (pid {data['pid']}, version {data['version']}) runs for {age(data['started_at'])}: {runs}.")
    note(f"Home: {data['home']}")
    if data["gateway"]:
        note(f"The gateway speaks OpenAI's API on {data['gateway']}.")


def _alive(client: Client) -> bool:
    try:
        client.status()
    except DaemonUnreachable:
        return False
    return True
