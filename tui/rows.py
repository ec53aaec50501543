"""A run as a row of the table: its cells, which columns fit, and whether a filter wants it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from lorad.text import coarse_age, number, one_line, why

Json = dict[str, Any]
PADDING = 2  # cells beside each column

# How a state looks besides its colour.
SIGNS = {
    "queued": ("◌", "cyan"),
    "starting": ("◐", "cyan"),
    "running": ("●", "green"),
    "stopping": ("◑", "yellow"),
    "paused": ("‖", "yellow"),
    "completed": ("✔", "blue"),
    "stopped": ("■", "blue"),
    "killed": ("✖", "magenta"),
}
BAD = ("✖", "bold red")  # failed, lost, attestation_failed, and whatever else may come


@dataclass(frozen=True)
class Column:
    """`least`..`most`: cells wide. `leaves`: the larger, the sooner it goes when there is no room."""

    key: str
    least: int
    most: int
    leaves: int
    right: bool = False


COLUMNS = (
    Column("name", 8, 28, 0),
    Column("state", 10, 20, 1),
    Column("step", 5, 15, 2, right=True),
    Column("done", 8, 8, 6),
    Column("reward", 6, 8, 3, right=True),
    Column("eval", 11, 15, 4),
    Column("tok/s", 6, 8, 5, right=True),
    Column("version", 7, 8, 7),
    Column("owner", 5, 12, 9),
    Column("age", 4, 5, 8, right=True),
    Column("why", 8, 60, 10),
)
BY_KEY = {column.key: column for column in COLUMNS}


def state_text(run: Json) -> Text:
    """A sign and a word; an ended run is told by its reason."""
    word = str(run.get("reason") or run["state"]) if run["state"] == "ended" else str(run["state"])
    sign, style = SIGNS.get(word, BAD)
    return Text(f"{sign} {one_line(word).replace('_', ' ')}", style=style)


def bar(part: float, width: int) -> str:
    """0.5 -> ████░░░░"""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[rest] * (rest > 0)).ljust(width, "░")


def share(run: Json) -> float:
    return float(run.get("step") or 0) / run["steps"] if run.get("steps") else 0.0


def eval_text(run: Json) -> str:
    first, last = run.get("eval_first"), run.get("eval_last")
    return "" if first is None else f"{number(first)}→{number(last)}"


def rate(run: Json) -> float | None:
    """Tokens per second; None unless it runs."""
    return (run.get("rates") or {}).get("tokens_per_second") if run["state"] == "running" else None


def cells(run: Json) -> dict[str, Text]:
    """The text of every column."""
    plain = {
        "name": run["name"],
        "step": f"{run.get('step') or 0}/{run.get('steps') or '?'}",
        "done": bar(share(run), 8),
        "reward": number(run.get("reward")),
        "eval": eval_text(run),
        "tok/s": number(rate(run), 0),
        "version": "" if run.get("version") is None else f"@{run['version']}",
        "owner": run.get("owner") or "",
        "age": coarse_age(run.get("created_at")),
        "why": why(run),
    }
    row = {key: Text(one_line(str(value)), no_wrap=True, overflow="ellipsis") for key, value in plain.items()}
    for key, text in row.items():
        text.justify = "right" if BY_KEY[key].right else "left"
    return {"state": state_text(run), **row}


def needs(rows: Iterable[dict[str, Text]], before: dict[str, int]) -> dict[str, int]:
    """The width of every column, grown where a cell of `rows` is wider."""
    widths = {column.key: column.least for column in COLUMNS} | before
    for row in rows:
        for key, text in row.items():
            if key != "why":
                widths[key] = min(max(widths[key], text.cell_len), BY_KEY[key].most)
    return widths


def layout(needs: dict[str, int], room: int) -> dict[str, int]:
    """Columns that fit into `room` cells, in order, with their widths; `why` takes what is left."""
    widths = dict(needs)
    leaving = sorted(COLUMNS, key=lambda column: -column.leaves)
    for column in leaving[:-2]:
        if sum(widths.values()) + PADDING * len(widths) <= room:
            break
        del widths[column.key]
    if "why" in widths:
        widths["why"] += room - sum(widths.values()) - PADDING * len(widths)
    return widths


def wanted(run: Json, filter: str) -> bool:
    """Whether a run has all the words; `state:` and `owner:` look there only, `!` turns a word round."""
    try:
        words = shlex.split(filter.lower())
    except ValueError:  # an open quote, while it is being typed
        words = filter.lower().split()
    return all(_has(run, word[1:]) is False if word[:1] == "!" and word[1:] else _has(run, word) for word in words)


def _has(run: Json, word: str) -> bool:
    state = f"{run['state']} {run.get('reason') or ''}"
    field, colon, value = word.partition(":")
    if colon and field in ("state", "owner"):
        return value in (state if field == "state" else str(run.get("owner") or "")).lower()
    return word in f"{run['name']} {state} {run.get('owner')} {run.get('pool') or ''} {why(run)}".lower()
