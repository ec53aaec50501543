"""Data goes to stdout, everything else to stderr. Text of models, users and logs is never read as markup."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lorad.cli.table import Column, print_table
from lorad.text import age, duration, number, printable, size, why

if TYPE_CHECKING:
    from lorad.errors import LoradError

Json = dict[str, Any]

__all__ = [
    "age", "duration", "note", "number", "print_error", "print_json", "print_table",
    "printable", "report", "run_row", "run_table", "size", "why",
]  # fmt: skip

RUNS = (
    *("name", "state", "step", Column("reward", 1), Column("eval", 3), Column("version", 4), Column("tok/s", 5)),
    *(Column("owner", 6), Column("age", 2), Column("why", kind="fold")),
)
NO_RUNS = "No runs. `lorad init` writes a spec to start from."


def print_json(data: Any) -> None:
    print(json_text(data, indent=2))


def json_text(data: Any, indent: int | None = None) -> str:
    """With what a terminal does not show as text (8-bit controls, marks of direction) as \\u escapes: the same data."""
    lines = json.dumps(data, indent=indent, ensure_ascii=False).split("\n")
    return "\n".join(line if line.isprintable() else "".join(map(escaped, line)) for line in lines)


def escaped(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


def print_error(error: LoradError) -> None:
    for one in (error, *error.others):
        note(f"error: {one.message}")
        if one.hint:
            note(f"  {one.hint}")


def report(text: str) -> None:
    """One line of what was asked for, on stdout."""
    print(printable(text), flush=True)


def note(text: str) -> None:
    """One line for a person, on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def run_table(runs: Sequence[Json]) -> None:
    """The table of `lorad list`."""
    print_table(RUNS, [run_row(run) for run in runs], empty=NO_RUNS)


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
        why(run),
    )
