"""The commands aliases and swap: what is served under which name, and who asks for it how much."""

from typing import Annotated

import typer

from lorad.cli import candidates, output, table
from lorad.cli.options import AsJson, Silent
from lorad.client import launch
from lorad.client.client import Client
from lorad.errors import SpecError
from lorad.records.versions import ServedAlias

_ALIASES = table.columns("alias, version, sha256 3, attested 1, state, by 4, age 2")
_TRAFFIC = table.columns(
    "alias, version, requests, failed 1, in flight 4, req/s 2, tok/s 5, first p50 7, p50 3, p95 6"
)


def aliases(
    alias: Annotated[
        str | None, typer.Argument(metavar="[ALIAS]", help="Its moves.", autocompletion=candidates.aliases)
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
            hint = "For example `lorad aliases support-bot --remove`."
            raise SpecError("--remove needs the name of an alias", hint=hint)
        answer = client.remove_alias(alias)
        output.note_or_json(answer, f"Alias {alias} is removed.", as_json=as_json)
        return
    if alias is not None and not traffic:
        moves = client.alias_moves(alias)
        versions = ("(removed)" if m.version is None else f"{m.run}@{m.version}" for m in moves)
        moved = [(version, m.by, output.age(m.at)) for version, m in zip(versions, moves, strict=True)]
        heads = ("version", "by", "age")
        output.table_or_json(moves, heads, moved, empty="No moves.", as_json=as_json)
        return
    served = [a for a in client.aliases() if alias in (None, a.alias)]
    if as_json:
        output.print_json(served)
    elif traffic:
        output.print_table(
            _TRAFFIC, [_traffic_row(a) for a in served], empty="No such aliases. `lorad aliases` lists all."
        )
    else:
        rows = []
        for a in served:
            state = "" if a.loaded is None else "loaded" if a.loaded else "cold"
            about = (a.sha256[:12], a.attested, state, a.by, output.age(a.updated_at))
            rows.append((a.alias, f"{a.run}@{a.version}", *about))
        output.print_table(_ALIASES, rows, empty="No aliases. `lorad swap ALIAS RUN@N` makes one.")
        for a in (a for a in served if a.previous):
            output.note(f"{a.previous} is kept: `lorad swap {a.alias} --rollback` goes back to it.")


def _traffic_row(alias: ServedAlias) -> tuple[str, ...]:
    """Cells are blank where no gateway is up, and times where it answered nothing in the last minute."""
    names = (alias.alias, f"{alias.run}@{alias.version}")
    traffic = alias.traffic
    if traffic is None:
        return (*names, *[""] * (len(_TRAFFIC) - len(names)))
    counts = (str(traffic.requests), str(traffic.failed), str(traffic.in_flight))
    rates = (f"{traffic.requests_per_second:.2f}", f"{traffic.tokens_per_second:.0f}")
    seconds = (traffic.ttft_p50, traffic.p50, traffic.p95)
    return (*names, *counts, *rates, *("" if s is None else f"{1000 * s:.0f} ms" for s in seconds))


def swap(
    alias: Annotated[
        str, typer.Argument(metavar="ALIAS", help="Made if there is none.", autocompletion=candidates.aliases)
    ],
    version: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN@N]", help="Or another alias, or a run.", autocompletion=candidates.versions
        ),
    ] = None,
    rollback: Annotated[
        bool,
        typer.Option("--rollback", help="Go back to the version before this one; a second time undoes that."),
    ] = False,
    quiet: Silent = False,
    as_json: AsJson = False,
) -> None:
    """Move an alias to a version that is loaded and attested first; what cannot be served changes nothing."""
    client = output.telling(launch.connected(), quiet=quiet or as_json)
    row = client.swap(alias, version, rollback=rollback)
    if as_json:
        output.print_json(row)
        return
    served = f"{row.run}@{row.version}"
    before = "" if row.previous is None else f", before {row.previous}"
    before = ", as before" if row.previous == served else before
    verdict = row.attestation.verdict
    output.note(f"{alias} serves {served}{before} ({verdict}, {row.seconds:.2f} s).")
    output.tell_address(row, alias)
