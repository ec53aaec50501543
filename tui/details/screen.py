"""The one screen of a bill, a device, the nodes and a pool: lines above a table, and ways on from there."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text
from textual.geometry import Size
from textual.widget import Widget

from lorad.client.client import Client
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.feed import Changes
from lorad.tui.screens.base import TableScreen
from lorad.tui.widgets.columns import Columns, Values
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Cells, Rows

Chosen = tuple[str, ...]


@dataclass(frozen=True)
class Drawn:
    """A drawing of a detail.

    Attributes:
        rows: The cells by row; None leaves the table as it is.
        command: The shell's way to it; "" leaves the status line as it is.
        opens: The screen (`run` or `pool`) that a row leads to, and what it is about; "" where there is none.
        about: What is said below the table of the row under the cursor, where a column cuts it.
        pool: The pool that it is all about.
        ended: The pool that `pool.end` ends.
    """

    title: Text
    above: Text | str = ""
    below: Text | str = ""
    rows: Mapping[str, Cells] | None = None
    values: Mapping[str, Values] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    opens: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    pool: str = ""
    ended: str = ""


@dataclass(frozen=True)
class DetailKind:
    """A kind of detail: how it is fetched and drawn.

    Attributes:
        name: Its name among the `SCREENS`.
        fetch: Asks the daemon, on the feed's thread; gets what is chosen.
        draw: Draws what was fetched, None before anything was; gets what is chosen and the size.
        lacks: Says that no pool is there to be opened.
        choices: What can be chosen among, in turn.
        chosen: What is chosen at first.
        seconds: How long what was fetched is good enough, if nothing happened that may change all.
        also: Widgets below the table, and who shows them what was fetched.
    """

    name: str
    columns: Columns
    fetch: Callable[[Client, Chosen], Any]
    draw: Callable[[Any | None, Chosen, Size], Drawn]
    lacks: str = ""
    choices: Sequence[Sequence[str]] = ()
    chosen: Chosen = ()
    seconds: float = 0.0
    also: tuple[Sequence[Widget], Callable[[Any], None]] = ((), lambda data: None)


class DetailScreen(TableScreen):
    """A detail: it is fetched and drawn as its kind says, and anew whenever something else is chosen.

    A class for each kind has its keys.
    """

    TABLE = "detail"
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

    def __init__(self, detail: DetailKind) -> None:
        super().__init__()
        self.detail = detail
        self.add_class(f"-{detail.name}")
        self._chosen = detail.chosen
        self._fetched: Any | None = None
        self._fetched_at = float("-inf")  # monotonic, the feed's thread's
        self._drawn = Drawn(Text())

    def body(self) -> Iterable[Widget]:
        yield Line(id="above")
        yield Rows(self.detail.columns, id=self.TABLE, marks_missing=self.detail.name == "bill")
        yield from self.detail.also[0]
        yield Line(id="below")

    def on_mount(self) -> None:
        self._draw()

    # -- what is fetched and drawn ---------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes) -> tuple[Chosen, Any] | None:
        chosen = self._chosen
        now = time.monotonic()
        if not changes.everything and now - self._fetched_at < self.detail.seconds:
            return None
        self._fetched_at = now
        return chosen, self.detail.fetch(client, chosen)

    def show(self, data: tuple[Chosen, Any]) -> None:
        chosen, fetched = data
        if chosen == self._chosen:  # else another one was chosen meanwhile
            self._fetched = fetched
            self._draw()
            self.detail.also[1](fetched)

    def _draw(self) -> None:
        self._drawn = drawn = self.detail.draw(self._fetched, self._chosen, self.size)
        self.say_title(drawn.title)
        self.query_one("#above", Line).say(drawn.above)
        if drawn.rows is not None:
            self.table.titles = drawn.titles
            self.table.show(drawn.rows, drawn.values)
        self.on_rows_moved()
        if drawn.command:
            self.offer(drawn.command, *self.targets("pool"))

    def on_rows_moved(self) -> None:
        below = self.query_one("#below", Line)
        text = one_line(self._drawn.about.get(self.table.key or "", "")) or self._drawn.below
        below.display = bool(text)
        below.say(text)

    def on_resize(self) -> None:
        self._draw()

    # -- what keys act on ------------------------------------------------------------------------------------
    def targets(self, on: str) -> list[str]:
        return [self._drawn.ended] if on == "pool" and self._drawn.ended else []

    def has(self, target: str) -> bool:
        return target == self._drawn.ended

    def action_choose(self, which: int, by: int) -> None:
        """Choose the next one of some choices, or one before."""
        choices = self.detail.choices[which]
        place = (choices.index(self._chosen[which]) + by) % len(choices)
        self._chosen = (*self._chosen[:which], choices[place], *self._chosen[which + 1 :])
        self._fetched = None
        self._draw()
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
            self.notify(self.detail.lacks, markup=False)
