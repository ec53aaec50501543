"""The checkpoints of a run, from which it can continue."""

import shlex
from typing import NamedTuple

from textual.app import ComposeResult

from lorad.client.client import Client
from lorad.records.runs import RunDetails
from lorad.records.versions import Checkpoint
from lorad.text import coarse_age, one_line, size
from lorad.tui.actions.table import bindings
from lorad.tui.feed import Changes
from lorad.tui.screens.tab import RunTab
from lorad.tui.widgets.columns import TableColumn, TableRow, row_of
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

_KINDS = ("checkpoint", "attempt", "rewind", "state", "end")
_COLUMNS = (
    TableColumn("step", 6, 10, 0, right=True, orders=True),
    TableColumn("version", 8, 10, 0),
    TableColumn("state", 10, 20, 0),
    TableColumn("done again", 10, 14, 5, right=True),
    TableColumn("size", 7, 10, 2, right=True, orders=True),
    TableColumn("age", 4, 5, 3, right=True, orders=True),
    TableColumn("path", 8, 200, 6, rest=True),
)
_EMPTY = "No checkpoints yet: resumed, it would start from the beginning. A paused or stopped run writes one."


class _Shown(NamedTuple):
    """The checkpoints, newest first. at: the step that the run is at."""

    checkpoints: list[Checkpoint]
    at: int


class CheckpointsTab(RunTab):
    TITLE = "checkpoints"
    BINDINGS = bindings("checkpoints")
    SCOPED_CSS = False  # it goes by the size of the screen
    DEFAULT_CSS = """
    CheckpointsTab { height: 1fr; }
    CheckpointsTab #checkpoints-head { height: auto; max-height: 2; padding: 0 1; }
    CheckpointsTab Rows { height: 1fr; background: $background; }
    CheckpointsTab #checkpoint-facts { height: auto; max-height: 3; padding: 0 1;
        border-top: solid $primary; }
    .-short CheckpointsTab #checkpoints-head { max-height: 1; }
    .-short CheckpointsTab #checkpoint-facts { display: none; }
    """

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self._table = Rows(_COLUMNS, id="checkpoints-rows")
        self._latest: _Shown | None = None  # what was read last
        self._checkpoints: dict[str, Checkpoint] = {}  # by row, newest first

    def compose(self) -> ComposeResult:
        yield Line(id="checkpoints-head")
        yield self._table
        yield Line(id="checkpoint-facts")

    def read(self, client: Client, changes: Changes, run: RunDetails) -> _Shown | None:
        before = self._latest
        at = run.step
        if before is None or any(changes.touch(self.run_name, kind) for kind in _KINDS):
            self._latest = _Shown(client.checkpoints(self.run_name)[::-1], at)
        elif at != before.at:
            self._latest = before._replace(at=at)
        return None if self._latest is before else self._latest

    def show(self, data: _Shown) -> None:
        self._checkpoints = {f"{saved.step}.{saved.attempt}": saved for saved in data.checkpoints}
        newest = next(iter(self._checkpoints), None)
        rows = dict[str, TableRow]()
        for key, saved in self._checkpoints.items():
            behind = data.at - saved.step
            word, style = ("● newest, whole", "bold green") if key == newest else ("✔ whole", "green")
            rows[key] = row_of(
                {
                    "step": saved.step,
                    "version": f"@{saved.version}",
                    "state": word,
                    "done again": f"{behind} step{'s' * (behind != 1)}" if behind > 0 else "nothing",
                    "size": (size(saved.bytes), saved.bytes),
                    "age": (coarse_age(saved.created_at), -saved.created_at),
                    "path": saved.path,
                }
            )
            rows[key].cells["state"].style = style
        self._table.show_rows(rows)
        head = _EMPTY
        if data.checkpoints:
            weight = size(sum(saved.bytes for saved in data.checkpoints))
            whole = f"{len(data.checkpoints)} whole checkpoints, {weight}."
            head = f"{whole} Under the cursor: r resumes from it, f forks it."
        self.query_one("#checkpoints-head", Line).say(head)

    def on_rows_moved(self) -> None:
        path = "" if self.chosen is None else str(self.chosen.path)
        self.query_one("#checkpoint-facts", Line).say(one_line(path))

    # -- what keys act on ------------------------------------------------------------------------------------
    @property
    def chosen(self) -> Checkpoint | None:
        return self._checkpoints.get(self._table.key or "")

    def targets(self, on: str) -> list[str]:
        chosen = self.chosen if on == "version" else None
        return [] if chosen is None else [f"{self.run_name}@{chosen.version}"]

    def preset(self, verb: str, target: str) -> dict[str, str]:
        chosen = self.chosen
        return {"from": str(chosen.step)} if verb == "resume" and chosen is not None else {}

    def command(self) -> str:
        return f"lorad checkpoints {shlex.quote(self.run_name)}"
