"""lorad aliases [ALIAS]: what is served under which name."""

from __future__ import annotations

from typing import Annotated

import typer

from lorad.cli.options import AsJson
from lorad.cli.output import age, note, print_json, print_table
from lorad.client import Client
from lorad.errors import SpecError

app = typer.Typer(add_completion=False)


@app.command()
def aliases(
    alias: Annotated[str | None, typer.Argument(metavar="[ALIAS]", help="Its moves.", show_default=False)] = None,
    remove: Annotated[bool, typer.Option("--remove", help="End this alias.")] = False,
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
    found = client.aliases() if alias is None else client.alias_moves(alias)
    if as_json:
        print_json(found)
    elif alias is None:
        rows = [
            (a["alias"], f"{a['run']}@{a['version']}", a["sha256"][:12], a["attested"], a["by"], age(a["updated_at"]))
            for a in found
        ]
        columns = ("alias", "version", "sha256", "attested", "by", "age")
        print_table(columns, rows, empty="No aliases. `lorad swap ALIAS RUN@N` makes one.")
    else:
        moves = [
            ("(removed)" if m["version"] is None else f"{m['run']}@{m['version']}", m["by"], age(m["at"]))
            for m in found
        ]
        print_table(("version", "by", "age"), moves, empty="No moves.")
