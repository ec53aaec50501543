"""Data goes to stdout, everything else to stderr. Text of models, users and logs is never read as markup."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lorad.errors import LoradError

Json = dict[str, Any]


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_error(error: LoradError) -> None:
    note(f"error: {error.message}")
    if error.hint:
        note(f"  {error.hint}")


def note(text: str) -> None:
    """One line for a person."""
    print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Text without control characters: no terminal escapes from models, logs or users."""
    return "".join(c if c in "\n\t" or (c.isprintable()) else f"\\x{ord(c):02x}" for c in text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str) -> None:
    """A plain table on stdout, as wide as the terminal allows; `empty` is said on stderr when there are no rows."""
    rows = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    if not rows:
        note(empty)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column != "why", overflow="ellipsis" if column != "why" else "fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    terminal = sys.stdout.isatty()
    Console(width=None if terminal else 200).print(table)


def number(value: Any, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def size(count: float | None) -> str:
    """1536 -> 1.5 KiB."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def age(then: float | None) -> str:
    """How long ago a Unix time was."""
    return "" if then is None else duration(time.time() - then)


def duration(seconds: float) -> str:
    """75 -> 1m15s."""
    whole = max(int(seconds), 0)
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def run_table(runs: Sequence[Json]) -> None:
    """The table of `lorad list`."""
    columns = ("name", "state", "step", "reward", "eval", "version", "tok/s", "owner", "age", "why")
    print_table(columns, [run_row(r) for r in runs], empty="No runs. `lorad init` writes a spec to start from.")


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


def why(run: Json) -> str:
    """Why a run waits, or what went wrong."""
    bad = run.get("reason") not in (None, "completed", "stopped")
    return str(run.get("waiting") or (run.get("detail") if bad else "") or "")
