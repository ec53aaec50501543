"""The one screen of a bill, a device, the nodes and a pool: lines above a table, and ways on from there."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rich.text import Text
from textual.widget import Widget

from lorad.client.client import Client
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.feed import Changes
from lorad.tui.screens.base import TableScreen
from lorad.tui.widgets.columns import Columns, TableRow
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

Chosen = tuple[str, ...]


@dataclass(frozen=True)
class Drawn:
    """A drawing of a detail.

    Attributes:
        rows: The rows of the table by key; None leaves the table as it is.
        command: The shell's way to it; "" leaves the status line as it is.
        opens: The screen (`run` or `pool`) that a row leads to, and what it is about; "" where there is none.
        about: What is said below the table of the row under the cursor, where a column cuts it.
        pool: The pool that it is all about.
        ended: The pool that `pool.end` ends.
    """

    title: Text
    above: Text | str = ""
    below: Text | str = ""
    rows: Mapping[str, TableRow] | None = None
    titles: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    opens: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    pool: str = ""
    ended: str = ""


class DetailScreen(TableScreen):
    """A detail, which is fetched and drawn anew whenever something else is chosen.

    Attributes:
        NAME: Its name among the `SCREENS`.
        LACKS: What is said where there is no pool to open.
        CHOICES: What can be chosen among, in turn.
        CHOSEN: What is chosen at first.
        SECONDS: How long what was fetched is good enough, if nothing happened that may change all.
        below_table: Further widgets, which stand below the table.
    """

    NAME: ClassVar[str]
    COLUMNS: ClassVar[Columns]
    LACKS: ClassVar[str] = ""
    CHOICES: ClassVar[Sequence[Sequence[str]]] = ()
    CHOSEN: ClassVar[Chosen] = ()
    SECONDS: ClassVar[float] = 0.0
    BINDINGS = bindings("back")
    DEFAULT_CSS = """
    DetailScreen #above { height: auto; width: 100%; padding: 0 1; }
    DetailScreen #below { height: auto; max-height: 3; width: 100%; padding: 0 1; }
    DetailScreen #detail { height: 1fr; min-height: 3; background: $background; }
    DetailScreen.-bill #above, DetailScreen.-bill #below { height: 1; }
    DetailScreen.-device #above { text-wrap: nowrap; }
    DetailScreen.-nodes #above { max-height: 4; }
    DetailScreen.-pool #above { max-height: 8; }
    DetailScreen.-pool #detail { height: auto; max-height: 40%; }
    DetailScreen.-pool.-short #above { max-height: 2; }
    DetailScreen.-pool.-middle #above { max-height: 4; }
    DetailScreen PoolLogs { height: 1fr; min-height: 4; }
    DetailScreen.-short PoolLogs { display: none; }
    """

    def __init__(self, subject: str = "") -> None:
        """Make the screen. subject: the name of the device or the pool that it is about."""
        super().__init__()
        self.subject = subject
        self.below_table: Sequence[Widget] = ()
        self.add_class(f"-{self.NAME}")
        self._chosen = self.CHOSEN
        self._fetched: Any | None = None
        self._fetched_at = float("-inf")  # monotonic, the feed's thread's
        self._drawn = Drawn(Text())
        self.table = Rows(self.COLUMNS, id="detail", marks_missing=self.NAME == "bill")

    def fetch(self, client: Client, chosen: Chosen) -> Any:
        """Ask the daemon for what is chosen, on the feed's thread."""
        raise NotImplementedError

    def draw(self, fetched: Any | None, chosen: Chosen) -> Drawn:
        """Draw what was fetched; None before anything was."""
        raise NotImplementedError

    def body(self) -> Iterable[Widget]:
        yield Line(id="above")
        yield self.table
        yield from self.below_table
        yield Line(id="below")

    def on_mount(self) -> None:
        self._redraw()

    # -- what is fetched and drawn ---------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes) -> tuple[Chosen, Any] | None:
        chosen = self._chosen
        now = time.monotonic()
        if not changes.everything and now - self._fetched_at < self.SECONDS:
            return None
        self._fetched_at = now
        return chosen, self.fetch(client, chosen)

    def show(self, data: tuple[Chosen, Any]) -> None:
        chosen, fetched = data
        if chosen == self._chosen:  # else another one was chosen meanwhile
            self._fetched = fetched
            self._redraw()

    def _redraw(self) -> None:
        self._drawn = drawn = self.draw(self._fetched, self._chosen)
        self.say_title(drawn.title)
        self.query_one("#above", Line).say(drawn.above)
        if drawn.rows is not None:
            self.table.titles = drawn.titles
            self.table.show_rows(drawn.rows)
        self.on_rows_moved()
        if drawn.command:
            self.offer(drawn.command, *self.targets("pool"))

    def on_rows_moved(self) -> None:
        below = self.query_one("#below", Line)
        text = one_line(self._drawn.about.get(self.table.key or "", "")) or self._drawn.below
        below.display = bool(text)
        below.say(text)

    def on_resize(self) -> None:
        self._redraw()

    # -- what keys act on ------------------------------------------------------------------------------------
    def targets(self, on: str) -> list[str]:
        return [self._drawn.ended] if on == "pool" and self._drawn.ended else []

    def has(self, target: str) -> bool:
        return target == self._drawn.ended

    def action_choose(self, which: int, by: int) -> None:
        choices = self.CHOICES[which]
        place = (choices.index(self._chosen[which]) + by) % len(choices)
        self._chosen = (*self._chosen[:which], choices[place], *self._chosen[which + 1 :])
        self._fetched = None
        self._redraw()
        self.lorad.feed.again()

    def action_pool(self) -> None:
        self._open("pool", self._drawn.pool or self._drawn.opens.get(self.table.key or "", ("", ""))[1])

    def on_rows_selected(self, event: Rows.Selected) -> None:
        if event.key in self._drawn.opens:
            self._open(*self._drawn.opens[event.key])

    def _open(self, screen: str, about: str) -> None:
        if screen == "run":
            self.lorad.open_run(about)
        elif about:
            self.lorad.open(screen, about)
        else:
            self.notify(self.LACKS, markup=False)
