"""The result of `make bench` as a table on stderr."""

from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("limit or peer", "", "lorad", "ratio", "target", "stretch", "reached", "MB", "peer's MB")


def show(result: dict[str, Any], measure: str) -> None:
    """Print the rows of a measure, and the machine."""
    title = f"lorad in CPU time of one thread, {measure} (medians; ratios are of one interleaved run)"
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for row in result["rows"]:
        table.add_row(*cells(row))
    console = Console(stderr=True, width=170)
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in result["machine"].items()), soft_wrap=True)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["what"],
        row["peer_name"],
        number(row["peer"]),
        number(row["lorad"]),
        ratio(row["ratio"], row["judgement"]),
        goal(row["target"], row["judgement"]),
        goal(row["stretch"], row["judgement"]),
        reached(row),
        number(row["peak_mb"]),
        number(row["peer_peak_mb"]),
    )


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(value: float | None, judgement: str) -> str:
    if value is None:
        return ""
    return f"{value:.0%}" if judgement == "share" else f"{value:.2f}x"


def goal(value: float | None, judgement: str) -> str:
    if value is None:
        return ""
    sign = "<=" if judgement in ("cost", "at most") else ">="
    return f"{sign} {f'{value:g}' if judgement == 'at most' else ratio(value, judgement)}"


def reached(row: dict[str, Any]) -> str:
    if row["reached"] is None and row["stretch_reached"] is None:
        return ""
    if row["stretch_reached"]:
        return "stretch"
    return {True: "yes", False: "NO", None: "no"}[row["reached"]]
