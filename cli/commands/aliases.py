"""lorad aliases [ALIAS]: what is served under which name, and who asks for it how much."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.cli.options import AsJson
from lorad.cli.output import age, note, print_json, print_table
from lorad.cli.table import Column
from lorad.client.client import Client
from lorad.client.transport import Json
from lorad.errors import SpecError

app = typer.Typer(add_completion=False)
ALIASES = ("alias", "version", Column("sha256", 3), Column("attested", 1), Column("by", 4), Column("age", 2))
TRAFFIC = (
    *("alias", "version", "requests", Column("failed", 1), Column("in flight", 4), Column("req/s", 2)),
    *(Column("tok/s", 5), Column("first p50", 7), Column("p50", 3), Column("p95", 6)),
)


@app.command()
def aliases(
    alias: Annotated[
        str | None,
        typer.Argument(metavar="[ALIAS]", help="Its moves.", show_default=False, autocompletion=candidates.aliases),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="End this alias.")] = False,
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Requests at the gateway; rates and times of the last minute.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Aliases and their versions; of one, all moves, newest first."""
    client = Client()
    if remove:
        if alias is None:
            raise SpecError("--remove needs the name of an alias", hint="As in `lorad aliases support-bot --remove`.")
        answer = client.remove_alias(alias)
        print_json(answer) if as_json else note(f"Alias {alias} is no more.")
        return
    found = client.aliases() if alias is None or traffic else client.alias_moves(alias)
    if traffic and alias is not None:
        found = [a for a in found if a["alias"] == alias]
    if as_json:
        print_json(found)
    elif traffic:
        print_table(TRAFFIC, [traffic_row(a) for a in found], empty="No such aliases. `lorad aliases` lists all.")
    elif alias is None:
        rows = [
            (a["alias"], f"{a['run']}@{a['version']}", a["sha256"][:12], a["attested"], a["by"], age(a["updated_at"]))
            for a in found
        ]
        print_table(ALIASES, rows, empty="No aliases. `lorad swap ALIAS RUN@N` makes one.")
        for a in (a for a in found if a.get("previous")):
            note(f"{a['previous']} is kept: `lorad swap {a['alias']} --rollback` goes back to it.")
    else:
        moves = [
            ("(removed)" if m["version"] is None else f"{m['run']}@{m['version']}", m["by"], age(m["at"]))
            for m in found
        ]
        print_table(("version", "by", "age"), moves, empty="No moves.")


def traffic_row(alias: Json) -> tuple[str, ...]:
    """Blank where no gateway is up, and times where nothing was answered of late."""
    names, told = (alias["alias"], f"{alias['run']}@{alias['version']}"), alias["traffic"]
    if told is None:
        return (*names, *[""] * (len(TRAFFIC) - len(names)))
    counts = (str(told[key]) for key in ("requests", "failed", "in_flight"))
    rates = (f"{told['requests_per_second']:.2f}", f"{told['tokens_per_second']:.0f}")
    times = (milliseconds(told[key]) for key in ("ttft_p50", "p50", "p95"))
    return (*names, *counts, *rates, *times)


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f} ms"
