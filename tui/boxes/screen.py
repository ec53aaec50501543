"""Shows which boxes answer, which devices are free there, and how their runs are; `enter` opens one."""

from collections.abc import Iterable

from rich.text import Text
from textual.widget import Widget

from lorad.client.boxes.hosts import HERE
from lorad.client.client import Client
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.one_liners import alarms_line, counted
from lorad.tui.dashboard.run_rows import LEVELS
from lorad.tui.feed import Changes
from lorad.tui.screens.base import TableScreen
from lorad.tui.watch import BoxState
from lorad.tui.widgets.columns import Fact, TableColumn, TableRow, row_of
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

_COLUMNS = (
    TableColumn("box", 6, 24, 0, orders=True, shrinks=10),
    TableColumn("state", 11, 11, 0, orders=True),
    TableColumn("free", 4, 7, 0, right=True, orders=True),
    TableColumn("running", 7, 7, 0, right=True, orders=True),
    TableColumn("queued", 6, 6, 1, right=True, orders=True),
    TableColumn("failed", 6, 6, 2, right=True, orders=True),
    TableColumn("alarms", 6, 6, 0, right=True, orders=True),
    TableColumn("user", 5, 12, 5),
    TableColumn("says", 8, 200, 3, rest=True),
)
_STYLES = {"reachable": "green", "asked": "dim", "late": "yellow", "no daemon": "yellow"}
_WORKING = ("starting", "running", "stopping")


class BoxesScreen(TableScreen):
    OVER_BOXES = True
    BINDINGS = bindings("boxes", "back")
    DEFAULT_CSS = """
    BoxesScreen #boxes { height: 1fr; min-height: 3; background: $background; }
    BoxesScreen #box-says { height: auto; max-height: 4; width: 100%; padding: 0 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[str, BoxState] = {}
        self.table = Rows(_COLUMNS, id="boxes")

    def body(self) -> Iterable[Widget]:
        yield self.table
        yield Line(id="box-says")

    def read(self, client: Client, changes: Changes) -> dict[str, BoxState] | None:
        states = {state.name: state for state in self.lorad.boxes.look()}
        return states if changes.everything or states != self._states else None

    def show(self, data: dict[str, BoxState]) -> None:
        self._states = data
        rows = dict[str, TableRow]()
        for name, state in data.items():
            counts = state.status.runs
            is_up = state.state == "reachable"
            figures: dict[str, Fact] = {
                "free": (f"{state.free}/{len(state.devices)}", state.free),
                "running": sum(counts.get(word, 0) for word in _WORKING),
                "queued": counts.get("queued", 0),
                "failed": state.failed,
                "alarms": len(state.alarms),
            }
            rows[name] = row = row_of(
                {
                    "box": name,
                    "state": state.state,
                    "user": state.status.caller.user,
                    "says": state.says or "; ".join(alarm.says for alarm in state.alarms[:1]),
                    **{key: figure if is_up else ("", None) for key, figure in figures.items()},
                }
            )
            row.cells["box"].style = "bold" if name == (self.lorad.box or HERE) else ""
            row.cells["state"].style = _STYLES.get(state.state, "red")
            if is_up and state.alarms:
                row.cells["alarms"].style = LEVELS[state.alarms[0].level][1]
            if is_up and state.failed:
                row.cells["failed"].style = "red"
        answer = sum(state.state == "reachable" for state in data.values())
        self.say_title(
            Text.assemble(("boxes", "bold"), f"  {answer} of {counted(len(data), 'box', 'es')} answer")
        )
        self.table.show_rows(rows)
        self.on_rows_moved()
        self.offer("lorad hosts")

    def on_rows_moved(self) -> None:
        """Say what is wrong with the box under the cursor, in full."""
        state = self._states.get(self.table.key or "", BoxState(""))
        alarmed = alarms_line(state.alarms) if state.alarms else Text()
        self.query_one("#box-says", Line).say(Text(one_line(state.says)) if state.says else alarmed)

    def on_rows_selected(self, event: Rows.Selected) -> None:
        self.lorad.show_box(event.key)
