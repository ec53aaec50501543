"""The bill: who used how much since when, by user, run, sweep, alias, pool or day, as `lorad bill` has it."""

import time

import msgspec
from rich.text import Text

from lorad.client.bill_words import bill_words
from lorad.client.client import Client
from lorad.records.bill import Bill
from lorad.tui.actions.table import bindings
from lorad.tui.details.screen import Chosen, DetailScreen, Drawn
from lorad.tui.widgets.columns import TableColumn, TableRow, row_of

_BY = ("user", "run", "sweep", "alias", "pool", "day")
_SINCE = {"1d": 86400, "7d": 7 * 86400, "30d": 30 * 86400, "all": None}
_SUMS = ("held", "busy", "wasted", "sampled", "trained", "served", "energy", "cost")  # that are summed


class BillScreen(DetailScreen):
    NAME = "bill"
    COLUMNS = (
        TableColumn("what", 12, 40, 0, orders=True, shrinks=16),
        TableColumn("owner", 5, 14, 7, orders=True),
        TableColumn("held", 6, 9, 0, right=True, orders=True),
        TableColumn("busy", 6, 9, 2, right=True, orders=True),
        TableColumn("wasted", 6, 9, 5, right=True, orders=True),
        TableColumn("sampled", 7, 15, 1, right=True, orders=True),
        TableColumn("trained", 7, 15, 6, right=True, orders=True),
        TableColumn("served", 6, 15, 3, right=True, orders=True),
        TableColumn("cached", 6, 6, 8, right=True, orders=True),
        TableColumn("energy", 6, 10, 9, right=True, orders=True),
        TableColumn("memory", 6, 10, 10, right=True, orders=True),
        TableColumn("disk", 6, 10, 7, right=True, orders=True),
        TableColumn("cost", 6, 14, 0, right=True, orders=True),
    )
    CHOICES = (_BY, [*_SINCE])
    CHOSEN = ("user", "7d")
    SECONDS = 30.0  # use is kept by the hour
    BINDINGS = bindings("bill")

    def fetch(self, client: Client, chosen: Chosen) -> Bill:
        by, since = chosen
        seconds = _SINCE[since]
        return client.bill(by, since=None if seconds is None else time.time() - seconds)

    def draw(self, fetched: Bill | None, chosen: Chosen) -> Drawn:
        """Draw what is chosen, a row for each line of the bill, and the sum of all lines."""
        by, since = chosen
        parts: list[tuple[str, str]] = [("by ", "dim")]
        parts += [(f"[{each}]", "bold") if each == by else (f" {each} ", "") for each in _BY]
        parts += [("   since ", "dim")]
        parts += [(f"[{span}]", "bold") if span == since else (f" {span} ", "") for span in _SINCE]
        title = Text("bill", "bold")
        above = Text.assemble(*parts)
        command = f"lorad bill --by {by}{'' if since == 'all' else f' --since {since}'}"
        if fetched is None:
            return Drawn(title, above, " ", command=command)
        rows = dict[str, TableRow]()
        for line in fetched.rows:
            cached = line.cached / line.prompts if line.prompts else None
            order = msgspec.structs.asdict(line) | {"what": line.key, "cached": cached, "energy": line.joules}
            words = bill_words(by, line, fetched.currency)
            rows[line.key] = row_of({key: (text, order.get(key)) for key, text in words.items()})
        total = bill_words(by, fetched.total, fetched.currency)
        sums = " · ".join(f"{total[key]} {key}" for key in _SUMS if total[key])
        below = Text.assemble(("total  ", "bold"), sums) if rows else "Nothing was used."
        opens = {key: (by, key) for key in rows if key} if by in ("run", "pool") else {}
        return Drawn(title, above, below, rows, {"what": by}, command, opens)
