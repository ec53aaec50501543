"""The bill as a table and as CSV, and the times that it is asked for."""

import csv
import re
import sys
import time
from datetime import datetime

import msgspec

from lorad.cli import table
from lorad.client.box_shapes import Bill, BillLine, Quota
from lorad.client.columns import amount
from lorad.errors import SpecError
from lorad.text import duration, size

_UNITS = {"h": 3600, "d": 86400, "w": 7 * 86400}
_NOBODY = "(nobody)"
_COLUMNS = (
    table.Column("user", 4),
    table.Column("held"),
    table.Column("busy", 2),
    table.Column("wasted", 5),
    table.Column("sampled", 1),
    table.Column("trained", 6),
    table.Column("served", 3),
    table.Column("cached", 8),
    table.Column("energy", 9),
    table.Column("memory", 10),
    table.Column("disk", 7),
    table.Column("cost"),
)


def print_bill(bill: Bill) -> None:
    """Print a line for each key, what is nobody's behind them, and the sum of all."""
    total = msgspec.structs.replace(bill.total, key="total", owner="")
    lines = [*bill.rows, *([total] if len(bill.rows) > 1 else [])]
    rows = [_row(bill.by, line, bill.currency) for line in lines]
    after = 1 if bill.by in ("user", "day") else 0  # there is no other user in them
    columns: list[str | table.Column] = [bill.by, *_COLUMNS[after:]]
    table.print_table(columns, [(row[0], *row[1 + after :]) for row in rows], empty="Nothing was used.")
    if bill.quotas:
        print()
        heads = ("quota of", "used", "of", "per", "enough again")
        table.print_table(heads, [_quota(quota) for quota in bill.quotas], empty="")


def _row(by: str, line: BillLine, currency: str) -> tuple[str, ...]:
    return (
        _name(by, line.key),
        line.owner,
        duration(line.held),
        duration(line.busy),
        duration(line.wasted) if line.wasted >= 1 else "",
        *(_count(tokens) for tokens in (line.sampled, line.trained, line.served)),
        f"{line.cached / line.prompts:.0%}" if line.prompts else "",
        "" if line.joules is None else f"{line.joules / 3.6e6:.3g} kWh",
        size(line.memory or None),
        size(line.disk),
        "" if line.cost is None else f"{amount(line.cost)} {currency}",
    )


def _quota(quota: Quota) -> tuple[str, ...]:
    again = "" if quota.again is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(quota.again))
    return quota.user, f"{quota.used:.1f} h", f"{quota.most:g} h", quota.per, again


def _name(by: str, key: str) -> str:
    """Name a line: runs that are in no sweep, versions that were asked for without an alias, and the rest."""
    if key == "-":
        return "(no sweep)" if by == "sweep" else "(training)"
    return f"{key}N" if by == "alias" and key.endswith("@") else key or _NOBODY


def _count(tokens: int) -> str:
    return f"{tokens:,}".replace(",", " ") if tokens else ""


def print_csv(bill: Bill) -> None:
    """Print all figures of the rows, without their sum."""
    names = [name for name in BillLine.__struct_fields__ if name != "key"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([bill.by, *names, "currency"])
    for line in bill.rows:
        values = [getattr(line, name) for name in names]
        writer.writerow([line.key, *("" if value is None else value for value in values), bill.currency])


def time_of(option: str, text: str | None) -> float | None:
    """Read `2026-11-24`, `2026-11-24T18:00` (local), or how long ago: `36h`, `7d`, `2w`. Raises SpecError."""
    if text is None:
        return None
    if ago := re.fullmatch(r"(\d{1,6})([hdw])", text):
        return time.time() - int(ago[1]) * _UNITS[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        hint = f"Give a day (2026-11-24), a time (2026-11-24T18:00), or how long ago: {option} 7d."
        raise SpecError(f"{option} {text} is no time", hint=hint) from None
