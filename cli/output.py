"""Data goes to stdout, everything else to stderr. Text of models, users and logs is never read as markup."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lorad.text import age, duration, number, printable, size, why

if TYPE_CHECKING:
    from lorad.errors import LoradError

Json = dict[str, Any]

__all__ = [
    "age", "duration", "note", "number", "print_error", "print_json", "print_table",
    "printable", "run_row", "run_table", "size", "tell_address", "watch_versions", "why",
]  # fmt: skip


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_error(error: LoradError) -> None:
    note(f"error: {error.message}")
    if error.hint:
        note(f"  {error.hint}")


def note(text: str) -> None:
    """One line for a person."""
    print(printable(text), file=sys.stderr, flush=True)


def watch_versions() -> None:
    """A daemon of another version is named once for each command."""
    from lorad.transport import Transport

    Transport.on_other_version = other_version


def other_version(version: str) -> None:
    from lorad import __version__
    from lorad.paths import Home, default_home

    shared = Home(default_home()).shared_by is not None
    restart = "its admin replaces it with" if shared else "replace it with"
    daemon = f"version {version}" if version else "an earlier version"
    note(f"The daemon is {daemon}, this command is version {__version__}: {restart} `lorad daemon restart`.")


def tell_address(served: Json, model: str) -> None:
    """Where a model is asked, by whom, and a line that asks it."""
    if served.get("url"):
        note(f"Base URL: {served['url']} (the API key is a token of gateway.tokens)")
    if not served.get("gateway"):
        note("The gateway does not answer yet; `lorad logs --of gateway` says why.")
        return
    note(f"Socket: {served['gateway']}")
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 32})
    words = ["curl", "--unix-socket", served["gateway"], "http://lorad/v1/completions"]
    note(f"Try it: {shlex.join([*words, '-H', 'Content-Type: application/json', '-d', body])}")


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str, folded: Sequence[str] = ("why",)
) -> None:
    """A plain table on stdout, as wide as the terminal allows; `empty` is said on stderr when there are no rows.
    folded: columns whose cells may take several lines."""
    rows = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    if not rows:
        note(empty)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column not in folded, overflow="fold" if column in folded else "ellipsis")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    terminal = sys.stdout.isatty()
    Console(width=None if terminal else 200).print(table)


def run_table(runs: Sequence[Json]) -> None:
    """The table of `lorad list`."""
    columns = ("name", "state", "step", "reward", "eval", "version", "tok/s", "owner", "age", "why")
    print_table(columns, [run_row(r) for r in runs], empty="No runs. `lorad init` writes a spec to start from.")


def shortened(text: str, most: int = 120) -> str:
    """So that it has room in a table; `lorad show` has all of it."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip(' ,;')}…"


def run_row(run: Json) -> tuple[str, ...]:
    first, last = run.get("eval_first"), run.get("eval_last")
    rate = (run.get("rates") or {}).get("tokens_per_second")
    return (
        run["name"],
        run["state"] + (f": {run['reason']}" if run.get("reason") else ""),
        f"{run['step']}/{run['steps']}",
        number(run.get("reward")),
        f"{number(first)} -> {number(last)}" if first is not None else "",
        "" if run.get("version") is None else f"@{run['version']}",
        number(rate, 0) if run["state"] == "running" else "",
        str(run.get("owner", "")),
        age(run.get("created_at")),
        shortened(why(run)),
    )
