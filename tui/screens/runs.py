"""All runs, live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.text import Text
from textual import events
from textual.coordinate import Coordinate
from textual.widget import Widget
from textual.widgets import DataTable, Input, Static

from lorad.client import Client
from lorad.text import number, one_line, why
from lorad.tui import keys
from lorad.tui.feed import Changes
from lorad.tui.rows import BY_KEY, cells, layout, needs, rate, wanted
from lorad.tui.screens.base import Line, RunsBase
from lorad.tui.screens.run import RunScreen

Json = dict[str, Any]
ORDER = ("running", "starting", "stopping", "queued", "paused", "ended")
MOST = 500  # rows in the table at once
EMPTY = """No runs yet.

  lorad init               writes a spec to start from
  lorad run SPEC --detach  starts it; it appears here

a shows runs that ended days ago."""


class RunTable(DataTable[Text]):
    BINDINGS = keys.TABLE


class RunsScreen(RunsBase):
    BINDINGS = keys.RUNS

    def __init__(self) -> None:
        super().__init__()
        self._all = False  # also runs that ended days ago
        self._runs: list[Json] | None = None
        self._cells: dict[str, dict[str, Text]] = {}  # what the table shows, by run
        self._needs: dict[str, int] = {}  # the widest cell so far, by column
        self._widths: dict[str, int] = {}  # the columns of the table

    def body(self) -> Iterable[Widget]:
        yield RunTable(id="runs", cursor_type="row", zebra_stripes=False)
        yield Static(id="empty", markup=False)
        yield Line(id="why")
        yield Input(
            id="filter", placeholder="words, state:running, owner:ann, !word", compact=True, select_on_focus=False
        )

    def read(self, client: Client, changes: Changes) -> list[Json]:
        return client.list(all=self._all)

    def show(self, data: list[Json]) -> None:
        self._runs = data
        self.draw()

    @property
    def table(self) -> RunTable:
        return self.query_one(RunTable)

    @property
    def filter(self) -> str:
        return self.query_one("#filter", Input).value

    # -- drawing ---------------------------------------------------------------------------------------------------
    def draw(self) -> None:
        """Bring the table to what is wanted now; only cells that changed are touched."""
        if self._runs is None:
            return
        found = [run for run in self._runs if wanted(run, self.filter)]
        fresh = {run["name"]: cells(run) for run in found[:MOST]}
        chosen = self.selected()
        self._lay_out(fresh)
        self._remove(set(self._cells) - set(fresh))
        added = [self._put(name, row) for name, row in fresh.items()]
        if any(added):
            self._order(list(fresh))
        self._cells = fresh
        self._keep_cursor(chosen)
        self._draw_frame(found)

    def _lay_out(self, fresh: dict[str, dict[str, Text]]) -> None:
        """Other columns only when the terminal or a width changed: widths grow with their content, never shrink."""
        self._needs = needs(fresh.values(), self._needs)
        widths = layout(self._needs, self.size.width - 2)
        if widths == self._widths:
            return
        self._widths, self._cells = widths, {}
        self.table.clear(columns=True)
        for key, width in widths.items():
            self.table.add_column(Text(key, justify="right" if BY_KEY[key].right else "left"), key=key, width=width)

    def _remove(self, gone: set[str]) -> None:
        for name in gone:
            self.table.remove_row(name)

    def _put(self, name: str, row: dict[str, Text]) -> bool:
        """Whether the row is new."""
        shown = self._cells.get(name)
        if shown is None:
            self.table.add_row(*(row[key] for key in self._widths), key=name)
            return True
        for key in self._widths:
            if row[key] != shown[key]:
                self.table.update_cell(name, key, row[key])
        return False

    def _order(self, names: list[str]) -> None:
        place = {one_line(name): i for i, name in enumerate(names)}
        self.table.sort("name", key=lambda cell: place.get(cell.plain, 0))

    def _keep_cursor(self, name: str | None) -> None:
        """The cursor stays with its run, wherever that went: keys never hit another one."""
        if name in self._cells and self.selected() != name:
            self.table.move_cursor(row=self.table.get_row_index(name), animate=False)

    def _draw_frame(self, found: list[Json]) -> None:
        runs = self._runs or []
        self.table.display = bool(found)
        empty = self.query_one("#empty", Static)
        empty.display = not found
        empty.update(f"No run has all of: {self.filter}\n\nesc shows all runs again." if runs else EMPTY)
        self.query_one("#title", Line).say(self._title(runs, found))
        self._draw_why()

    def _title(self, runs: list[Json], found: list[Json]) -> Text:
        counts = Counter(str(run["state"]) for run in runs)
        speed = sum(rate(run) or 0 for run in runs)
        parts = [", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state]) or "no runs"]
        parts += [f"{number(speed, 0)} tok/s"] if speed else []
        parts += [f"{len(found)} of {len(runs)} shown"] if self.filter else []
        parts += [f"the first {MOST} of {len(found)}"] if len(found) > MOST else []
        parts += ["old runs too"] if self._all else []
        parts += ["READ-ONLY"] if self.lorad.readonly else []
        return Text.assemble(("lorad  ", "bold"), " · ".join(parts))

    def _draw_why(self) -> None:
        run = self._selected_run()
        reason = one_line(why(run)) if run else ""
        line = self.query_one("#why", Line)
        line.say(f"{run['name']}: {reason}" if run and reason else "")
        line.display = bool(reason)
        self.offer(run["name"] if run else None)

    # -- events and keys -------------------------------------------------------------------------------------------
    def selected(self) -> str | None:
        table = self.table
        if not self._cells or not table.is_valid_row_index(table.cursor_row):
            return None
        return table.coordinate_to_cell_key(Coordinate(table.cursor_row, 0)).row_key.value

    def state(self) -> str:
        run = self._selected_run()
        return str(run["state"]) if run else ""

    def _selected_run(self) -> Json | None:
        name = self.selected()
        return next((run for run in self._runs or () if run["name"] == name), None)

    def on_resize(self, event: events.Resize) -> None:
        self.draw()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        self._draw_why()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.app.push_screen(RunScreen(event.row_key.value))

    def on_input_changed(self, event: Input.Changed) -> None:
        self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = bool(event.value)
        self.table.focus()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_unfilter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value, field.display = "", False
        self.table.focus()

    def action_all(self) -> None:
        self._all = not self._all
        self.lorad.feed.open(self)
