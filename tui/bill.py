"""Shows who used how much since when: the table of `lorad bill`, by user, run, sweep, alias, pool or day."""

import time
from collections.abc import Iterable

import msgspec
from rich.text import Text
from textual.widget import Widget

from lorad.client.bill_words import bill_words
from lorad.client.client import Client
from lorad.records.bill import Bill
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.run_rows import cell
from lorad.tui.feed import Changes
from lorad.tui.screens.base import TableScreen
from lorad.tui.widgets.columns import TableColumn, Values
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Cells, Rows

_BY = ("user", "run", "sweep", "alias", "pool", "day")
_SINCE = {"1d": 86400, "7d": 7 * 86400, "30d": 30 * 86400, "all": None}
_SECONDS = 30.0  # between two looks; use is kept by the hour
_COLUMNS = (
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


class BillScreen(TableScreen):
    TABLE = "bill"
    BINDINGS = bindings("bill", "back")
    DEFAULT_CSS = """
    BillScreen #bill-of { height: 1; width: 100%; padding: 0 1; }
    BillScreen #bill { height: 1fr; min-height: 3; background: $background; }
    BillScreen #bill-total { height: 1; width: 100%; padding: 0 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._by = "user"
        self._since = "7d"
        self._read_at = float("-inf")  # monotonic, the feed's thread's
        self._kept: Bill | None = None

    def body(self) -> Iterable[Widget]:
        yield Line(id="bill-of")
        yield Rows(_COLUMNS, id="bill", marks_missing=True)
        yield Line(id="bill-total")

    def on_mount(self) -> None:
        self._say()

    # -- what is read and shown ------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes) -> tuple[str, str, Bill] | None:
        by = self._by
        since = self._since
        if not changes.everything and time.monotonic() - self._read_at < _SECONDS:
            return None
        self._read_at = time.monotonic()
        seconds = _SINCE[since]
        return by, since, client.bill(by, since=None if seconds is None else time.time() - seconds)

    def show(self, data: tuple[str, str, Bill]) -> None:
        by, since, bill = data
        if (by, since) != (self._by, self._since):  # another one was chosen meanwhile
            return
        self._kept = bill
        rows = dict[str, Cells]()
        values = dict[str, Values]()
        for line in bill.rows:
            words = bill_words(by, line, bill.currency)
            rows[line.key] = {key: cell(one_line(text)) for key, text in words.items()}
            cached = line.cached / line.prompts if line.prompts else None
            order = msgspec.structs.asdict(line) | {"what": line.key, "cached": cached, "energy": line.joules}
            values[line.key] = {column.key: order.get(column.key) for column in _COLUMNS}
        self.table.titles = {"what": by}
        self.table.show(rows, values)
        self._say()

    def _say(self) -> None:
        """Show what is chosen, and the sum of all lines."""
        parts: list[tuple[str, str]] = [("by ", "dim")]
        parts += [(f"[{by}]", "bold") if by == self._by else (f" {by} ", "") for by in _BY]
        parts += [("   since ", "dim")]
        parts += [(f"[{span}]", "bold") if span == self._since else (f" {span} ", "") for span in _SINCE]
        self.query_one("#bill-of", Line).say(Text.assemble(*parts))
        self.say_title(Text.assemble(("bill", "bold")))
        bill = self._kept
        line = self.query_one("#bill-total", Line)
        if bill is None:
            line.say("")
        elif not bill.rows:
            line.say("Nothing was used.")
        else:
            total = bill_words(self._by, bill.total, bill.currency)
            shown = ("held", "busy", "wasted", "sampled", "trained", "served", "energy", "cost")
            sums = " · ".join(f"{total[key]} {key}" for key in shown if total[key])
            line.say(Text.assemble(("total  ", "bold"), sums))
        since = "" if self._since == "all" else f" --since {self._since}"
        self.offer(f"lorad bill --by {self._by}{since}")

    # -- keys ------------------------------------------------------------------------------------------------
    def action_by(self, by: int) -> None:
        self._choose(_BY[(_BY.index(self._by) + by) % len(_BY)], self._since)

    def action_since(self, by: int) -> None:
        times = [*_SINCE]
        self._choose(self._by, times[(times.index(self._since) + by) % len(times)])

    def _choose(self, by: str, since: str) -> None:
        self._by = by
        self._since = since
        self._kept = None
        self._say()
        self.lorad.feed.again()

    def on_rows_selected(self, event: Rows.Selected) -> None:
        """Open the run or the pool of a row."""
        if self._by == "run" and event.key:
            self.lorad.open_run(event.key)
        elif self._by == "pool" and event.key:
            self.lorad.open("pool", event.key)
