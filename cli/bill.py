"""The bill as a table and as CSV, and the times that it is asked for."""

import re
import time
from datetime import datetime

import msgspec

from lorad.cli import table
from lorad.client.bill_words import bill_words
from lorad.errors import SpecError
from lorad.records.bill import Bill
from lorad.text import moment, seconds_of

_COLUMNS = table.columns(
    "user 4, held, busy 2, wasted 5, sampled 1, trained 6, served 3, cached 8, energy 9, memory 10, disk 7, "
    "cost"
)


def print_bill(bill: Bill) -> None:
    """Print a line for each key and one for their sum, and the quotas of users."""
    total = msgspec.structs.replace(bill.total, key="total", owner="")
    lines = [*bill.rows, *([total] if len(bill.rows) > 1 else [])]
    rows = [[*bill_words(bill.by, line, bill.currency).values()] for line in lines]
    after = 1 if bill.by in ("user", "day") else 0  # there is no other user in them
    columns: list[str | table.Column] = [bill.by, *_COLUMNS[after:]]
    table.print_table(columns, [(row[0], *row[1 + after :]) for row in rows], empty="Nothing was used.")
    if bill.quotas:
        print()
        heads = ("quota of", "used", "of", "per", "enough again")
        quotas = []
        for quota in bill.quotas:
            again = "" if quota.again is None else moment(quota.again)
            quotas.append((quota.user, f"{quota.used:.1f} h", f"{quota.most:g} h", quota.per, again))
        table.print_table(heads, quotas, empty="")


def time_of(option: str, text: str | None) -> float | None:
    """Read `2026-11-24`, `2026-11-24T18:00` (local), or how long ago: `36h`, `7d`, `2w`. Raises SpecError."""
    if text is None:
        return None
    if re.fullmatch(r"\d{1,6}[hdw]", text):
        return time.time() - seconds_of(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        hint = f"Give a day (2026-11-24), a time (2026-11-24T18:00), or how long ago: {option} 7d."
        raise SpecError(f"{option} {text} is no time", hint=hint) from None
