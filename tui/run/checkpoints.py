"""The checkpoints of a run, from which it can continue."""

import shlex
from typing import NamedTuple

from rich.text import Text
from textual.app import ComposeResult

from lorad.client.client import Client
from lorad.records.runs import RunDetails
from lorad.records.versions import Checkpoint
from lorad.text import coarse_age, one_line, size
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.run_rows import cell
from lorad.tui.feed import Changes
from lorad.tui.screens.tab import RunTab
from lorad.tui.widgets.columns import TableColumn, Values
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Cells, Rows

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
        self._had: _Shown | None = None  # what was read last
        self._found: dict[str, Checkpoint] = {}  # by key of their rows, newest first

    def compose(self) -> ComposeResult:
        yield Line(id="checkpoints-head")
        yield self._table
        yield Line(id="checkpoint-facts")

    def read(self, client: Client, changes: Changes, run: RunDetails) -> _Shown | None:
        before = self._had
        at = run.step
        if before is None or any(changes.touch(self.run_name, kind) for kind in _KINDS):
            self._had = _Shown(client.checkpoints(self.run_name)[::-1], at)
        elif at != before.at:
            self._had = before._replace(at=at)
        return None if self._had is before else self._had

    def show(self, data: _Shown) -> None:
        self._found = {f"{saved.step}.{saved.attempt}": saved for saved in data.checkpoints}
        newest = next(iter(self._found), None)
        rows = dict[str, Cells]()
        values = dict[str, Values]()
        for key, saved in self._found.items():
            behind = data.at - saved.step
            texts = {
                "step": str(saved.step),
                "version": f"@{saved.version}",
                "done again": f"{behind} step{'s' * (behind != 1)}" if behind > 0 else "nothing",
                "size": size(saved.bytes),
                "age": coarse_age(saved.created_at),
                "path": one_line(saved.path),
            }
            word, style = ("● newest, whole", "bold green") if key == newest else ("✔ whole", "green")
            rows[key] = {name: cell(text) for name, text in texts.items()}
            rows[key]["state"] = Text(word, style=style, no_wrap=True)
            values[key] = {"step": saved.step, "size": saved.bytes, "age": -saved.created_at}
        self._table.show(rows, values)
        head = (
            "No checkpoints yet: resumed, it would start from the beginning. A paused or stopped run "
            "writes one."
        )
        if self._found:
            weight = size(sum(saved.bytes for saved in self._found.values()))
            head = f"{len(self._found)} whole checkpoints, {weight}. Under the cursor: r resumes from it, "
            head += "f forks it."
        self.query_one("#checkpoints-head", Line).say(head)

    def on_rows_moved(self) -> None:
        path = "" if self.chosen is None else str(self.chosen.path)
        self.query_one("#checkpoint-facts", Line).say(one_line(path))

    # -- what keys act on ------------------------------------------------------------------------------------
    @property
    def chosen(self) -> Checkpoint | None:
        return self._found.get(self._table.key or "")

    def targets(self, on: str) -> list[str]:
        chosen = self.chosen if on == "version" else None
        return [] if chosen is None else [f"{self.run_name}@{chosen.version}"]

    def preset(self, verb: str, target: str) -> dict[str, str]:
        chosen = self.chosen
        return {"from": str(chosen.step)} if verb == "resume" and chosen is not None else {}

    def command(self) -> str:
        return f"lorad checkpoints {shlex.quote(self.run_name)}"
