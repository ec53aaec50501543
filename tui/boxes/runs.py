"""Shows the runs of all boxes in one table; what is done to a row is done on its box."""

import shlex
from collections.abc import Iterable, Mapping

from rich.text import Text
from textual.widget import Widget

from lorad.client.client import Client
from lorad.records.runs import Run
from lorad.text import one_line
from lorad.tui import watch
from lorad.tui.actions.action import VerbAction
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.one_liners import counted
from lorad.tui.dashboard.run_columns import USUAL, shaped
from lorad.tui.dashboard.run_rows import LEVELS, Lazy, cells, values
from lorad.tui.dashboard.snapshot import rank
from lorad.tui.feed import Changes
from lorad.tui.screens.base import TableScreen
from lorad.tui.widgets.columns import Cells, TableColumn, Values
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

_BOX = TableColumn("box", 4, 16, 0, orders=True, shrinks=8)


class AllRunsScreen(TableScreen):
    """A row is called BOX/RUN, as in `lorad --host all list`."""

    OVER_BOXES = True
    BINDINGS = bindings("run", "back")
    DEFAULT_CSS = """
    AllRunsScreen #all-runs { height: 1fr; min-height: 3; background: $background; }
    AllRunsScreen #others { height: auto; max-height: 4; width: 100%; padding: 0 1; color: $text-warning;
        text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._boxes: tuple[watch.BoxState, ...] = ()
        self._runs: dict[str, tuple[watch.BoxState, Run]] = {}
        self.table = Rows((_BOX, *shaped(USUAL)), id="all-runs", marks_missing=True)

    def body(self) -> Iterable[Widget]:
        yield self.table
        yield Line(id="others")

    def read(self, client: Client, changes: Changes) -> tuple[watch.BoxState, ...] | None:
        states = self.lorad.boxes.look()
        return states if changes.everything or states != self._boxes else None

    def show(self, data: tuple[watch.BoxState, ...]) -> None:
        self._boxes = data
        rows = sorted(((state, run) for state in data for run in state.runs), key=lambda row: rank(row[1]))
        self._runs = {f"{state.name}/{run.name}": (state, run) for state, run in rows}
        self.table.show(Lazy(self._runs, self._cells_of), Lazy(self._runs, self._values_of))
        answer = sum(state.state == "reachable" for state in data)
        about = f"{counted(len(self._runs), 'run')} of {answer} of {counted(len(data), 'box', 'es')}"
        self.say_title(Text.assemble(("all boxes", "bold"), f"  {about}"))
        silent = [state for state in data if state.state != "reachable"]
        words = [f"{state.name}: {state.says or state.state}" for state in silent]
        self.query_one("#others", Line).say("\n".join(map(one_line, words)))
        self.on_rows_moved()

    def _cells_of(self, key: str) -> Cells:
        state, run = self._runs[key]
        row = cells(run, is_yours=state.user in (None, run.owner))
        levels = [alarm.level for alarm in state.alarms if alarm.on == "run" and alarm.subject == run.name]
        if levels and run.state != "ended":
            row["state"].append(f" {LEVELS[min(levels)][0]}", LEVELS[min(levels)][1])
        return {"box": Text(state.name, "bold"), **row}

    def _values_of(self, key: str) -> Values:
        state, run = self._runs[key]
        return {"box": state.name, **values(run, [self.table.by])} if self.table.by != "box" else {"box": key}

    # -- what keys act on ------------------------------------------------------------------------------------
    def targets(self, on: str) -> list[str]:
        return self.table.chosen if on == "run" else []

    def run_of(self, target: str) -> Run | None:
        return self._runs[target][1] if target in self._runs else None

    def has(self, target: str) -> bool:
        return target in self._runs

    def may_act(self, target: str) -> bool:
        state, run = self._runs[target]
        return state.user in (None, run.owner)

    def routed(self, target: str) -> tuple[Client, str]:
        box, _, run = target.partition("/")
        return watch.client_of(box), run

    def typed_line(self, verb: VerbAction, target: str, values: Mapping[str, str]) -> str:
        box, _, run = target.partition("/")
        return f"lorad --host {shlex.quote(box)}{verb.command(run, values).removeprefix('lorad')}"

    @property
    def far(self) -> str:
        """Name no box: each row does."""
        return ""

    # -- events ----------------------------------------------------------------------------------------------
    def on_rows_moved(self) -> None:
        box, _, run = (self.table.key or "").partition("/")
        line = f"lorad --host {shlex.quote(box)} show {shlex.quote(run)}" if run else "lorad --host all list"
        self.offer(line, *self.targets("run"))

    def on_rows_selected(self, event: Rows.Selected) -> None:
        box, _, run = event.key.partition("/")
        self.lorad.show_box(box, run)
