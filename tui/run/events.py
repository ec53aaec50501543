"""The events of a run, newest first: all of them, the events of one kind, or those with some words."""

import time
from collections import deque
from typing import NamedTuple

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Input

from lorad.client.client import Client
from lorad.client.log_lines import Words, has_words, words
from lorad.records.runs import Event, RunDetails
from lorad.text import number, one_line
from lorad.tui.actions.table import bindings
from lorad.tui.event_words import event_text
from lorad.tui.feed import EVENTS, Changes
from lorad.tui.screens.tab import FilteredTab
from lorad.tui.widgets.columns import Cells, TableColumn
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

_HISTORY = 500  # events to begin with
_MOST = 2000  # that are kept
_COLUMNS = (
    TableColumn("when", 8, 16, 4),
    TableColumn("kind", 5, 12, 2),
    TableColumn("what", 8, 400, 0, rest=True),
)
# Figures of a step: what they are called here, their key, digits.
_FIGURES = (("loss", "loss", 4), ("KL", "kl", 4), ("tok/s", "tokens_per_second", 0), ("s", "seconds", 2))
_STYLES = {"warning": "yellow", "removed": "magenta", "rewind": "yellow"}


class News(NamedTuple):
    """The events that are new, oldest first. is_all: there are no others before them."""

    events: list[Event]
    is_all: bool


class EventsTab(FilteredTab):
    TITLE = "events"
    BINDINGS = bindings("events")
    DEFAULT_CSS = """
    EventsTab #events-head { height: 1; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    EventsTab Rows { height: 1fr; background: $background; }
    EventsTab #event { height: auto; max-height: 4; padding: 0 1; color: $text-muted; }
    EventsTab Input { display: none; height: 1; }
    """

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self._events: deque[Event] = deque(maxlen=_MOST)
        self._rows: dict[str, Cells] = {}  # of all of them, by id
        self._kind = ""  # of which alone; "": of all
        self._words: Words = []
        self._last = 0  # id of the newest that was read: the feed's thread's alone

    def compose(self) -> ComposeResult:
        yield Line(id="events-head")
        yield Rows(_COLUMNS, id="events-rows")
        yield Line(id="event")
        yield Input(id="events-filter", placeholder='words, "two words", !word', compact=True)

    def on_mount(self) -> None:
        self._table = self.query_one(Rows)

    def read(self, client: Client, changes: Changes, run: RunDetails) -> News | None:
        is_all = changes.everything or len(changes.events) == EVENTS  # some may be missing
        if is_all:
            events = client.history(self.run_name, limit=_HISTORY)
        else:
            own = [event for event in changes.events if event.run == self.run_name]
            events = [event for event in own if event.id > self._last]
        if not events and not changes.everything:
            return None
        self._last = max((event.id for event in events), default=self._last)
        return News(events, is_all)

    # -- drawing ---------------------------------------------------------------------------------------------
    def show(self, data: News) -> None:
        if data.is_all:
            self._events.clear()
        self._events.extend(data.events)
        before = self._rows
        self._rows = {}
        for event in reversed(self._events):
            row = before.get(str(event.id))
            if row is None:
                kind = one_line(event.kind)
                then = time.localtime(event.at)
                is_today = then[:3] == time.localtime()[:3]
                when = time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", then)
                row = {
                    "when": Text(when, "dim"),
                    "kind": Text(kind, _STYLES.get(kind, "")),
                    "what": Text(what(event)),
                }
            self._rows[str(event.id)] = row
        self._draw()

    def _draw(self) -> None:
        """Draw the rows, and keep the cursor on the newest one if it was there."""
        was_first = self._table.cursor_row <= 0
        rows = {}
        for key, row in self._rows.items():
            kind = row["kind"].plain
            if self._kind in ("", kind) and has_words(f"{kind} {row['what'].plain}", self._words):
                rows[key] = row
        self._table.show(rows)
        if was_first:
            self._table.turn(0, 0)
        kinds = f"only {self._kind}" if self._kind else f"all kinds ({', '.join(self._kinds())})"
        head = f"{len(rows)} of {len(self._rows)} events · {kinds} · v: next kind"
        self.query_one("#events-head", Line).say(head)

    def _kinds(self) -> list[str]:
        return sorted({row["kind"].plain for row in self._rows.values()})

    def on_rows_moved(self) -> None:
        event = next((event for event in self._events if str(event.id) == self._table.key), None)
        text = ""
        if event is not None:
            text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at)) + f"  {what(event)}"
        self.query_one("#event", Line).say(text)

    # -- keys ------------------------------------------------------------------------------------------------
    def action_kind(self, by: int) -> None:
        """Show events of the next kind alone, and after the last one all."""
        kinds = ["", *self._kinds()]
        self._kind = kinds[(kinds.index(self._kind) + by) % len(kinds)] if self._kind in kinds else ""
        self._draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(action == "unfilter" and self._kind) or super().check_action(action, parameters)

    def action_unfilter(self) -> None:
        super().action_unfilter()
        self._kind = ""
        self._draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._words = words(event.value)
        self._draw()


def what(event: Event) -> str:
    """Describe an event; for a step with its main figures."""
    metrics = event.data.get("metrics")
    if event.kind != "step" or not isinstance(metrics, dict):
        return event_text(event)
    parts = [event_text(event)]
    for name, key, digits in _FIGURES:
        if isinstance(value := metrics.get(key), int | float):
            is_unit = name in ("tok/s", "s")
            parts.append(f"{number(value, digits)} {name}" if is_unit else f"{name} {number(value, digits)}")
    return ", ".join(parts)
