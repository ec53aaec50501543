"""lorad aliases [ALIAS]: what is served under which name, and who asks for it how much."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli import candidates
from lorad.cli.options import AsJson
from lorad.cli.output import age, note, print_json, print_table
from lorad.cli.table import Column
from lorad.client.client import Client
from lorad.client.shapes import Move, ServedAlias
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
        typer.Argument(
            metavar="[ALIAS]", help="Its moves.", show_default=False, autocompletion=candidates.aliases
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove this alias.")] = False,
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Requests at the gateway; rates and times of the last minute.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List aliases and their versions; for one alias, all its moves, newest first."""
    client = Client()
    if remove:
        if alias is None:
            raise SpecError(
                "--remove needs the name of an alias",
                hint="For example `lorad aliases support-bot --remove`.",
            )
        answer = client.remove_alias(alias)
        print_json(answer) if as_json else note(f"Alias {alias} is removed.")
        return
    if alias is not None and not traffic:
        show_moves(client.alias_moves(alias), as_json=as_json)
        return
    found = [a for a in client.aliases() if alias in (None, a.alias)]
    if as_json:
        print_json(found)
    elif traffic:
        print_table(
            TRAFFIC, [traffic_row(a) for a in found], empty="No such aliases. `lorad aliases` lists all."
        )
    else:
        rows = [
            (a.alias, f"{a.run}@{a.version}", a.sha256[:12], a.attested, a.by, age(a.updated_at))
            for a in found
        ]
        print_table(ALIASES, rows, empty="No aliases. `lorad swap ALIAS RUN@N` makes one.")
        for a in (a for a in found if a.previous):
            note(f"{a.previous} is kept: `lorad swap {a.alias} --rollback` goes back to it.")


def show_moves(moves: list[Move], *, as_json: bool) -> None:
    if as_json:
        print_json(moves)
        return
    rows = [("(removed)" if m.version is None else f"{m.run}@{m.version}", m.by, age(m.at)) for m in moves]
    print_table(("version", "by", "age"), rows, empty="No moves.")


def traffic_row(alias: ServedAlias) -> tuple[str, ...]:
    """Blank where no gateway is up, and times where nothing was answered of late."""
    names, told = (alias.alias, f"{alias.run}@{alias.version}"), alias.traffic
    if told is None:
        return (*names, *[""] * (len(TRAFFIC) - len(names)))
    counts = (str(told.requests), str(told.failed), str(told.in_flight))
    rates = (f"{told.requests_per_second:.2f}", f"{told.tokens_per_second:.0f}")
    times = map(milliseconds, (told.ttft_p50, told.p50, told.p95))
    return (*names, *counts, *rates, *times)


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f} ms"
