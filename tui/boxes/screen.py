"""Shows which boxes answer, which devices are free there, and how their runs are; `enter` opens one."""

from collections.abc import Iterable

from rich.text import Text
from textual.widget import Widget

from lorad.client.boxes.hosts import HERE
from lorad.client.client import Client
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.one_liners import alarms_line, counted
from lorad.tui.dashboard.run_rows import LEVELS, cell
from lorad.tui.feed import Changes
from lorad.tui.screens.base import TableScreen
from lorad.tui.watch import BoxState
from lorad.tui.widgets.columns import TableColumn, Values
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Cells, Rows

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
    TABLE = "boxes"
    OVER_BOXES = True
    BINDINGS = bindings("boxes", "back")
    DEFAULT_CSS = """
    BoxesScreen #boxes { height: 1fr; min-height: 3; background: $background; }
    BoxesScreen #box-says { height: auto; max-height: 4; width: 100%; padding: 0 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[str, BoxState] = {}

    def body(self) -> Iterable[Widget]:
        yield Rows(_COLUMNS, id=self.TABLE)
        yield Line(id="box-says")

    def read(self, client: Client, changes: Changes) -> dict[str, BoxState] | None:
        states = {state.name: state for state in self.lorad.boxes.look()}
        return states if changes.everything or states != self._states else None

    def show(self, data: dict[str, BoxState]) -> None:
        self._states = data
        rows = dict[str, Cells]()
        values = dict[str, Values]()
        for name, state in data.items():
            counts = state.status.runs
            is_up = state.state == "reachable"
            figures: dict[str, str | float | None] = {
                "free": state.free,
                "running": sum(counts.get(word, 0) for word in _WORKING),
                "queued": counts.get("queued", 0),
                "failed": state.failed,
                "alarms": len(state.alarms),
            }
            values[name] = {"box": name, "state": state.state, **(figures if is_up else {})}
            texts = {key: str(figure) if is_up else "" for key, figure in figures.items()}
            texts["free"] = f"{state.free}/{len(state.devices)}" if is_up else ""
            texts["user"] = state.status.caller.user
            texts["says"] = state.says or "; ".join(alarm.says for alarm in state.alarms[:1])
            rows[name] = {key: cell(one_line(text)) for key, text in texts.items()}
            rows[name]["box"] = cell(name, "bold" if name == (self.lorad.box or HERE) else "")
            rows[name]["state"] = cell(state.state, _STYLES.get(state.state, "red"))
            if is_up and state.alarms:
                rows[name]["alarms"] = cell(texts["alarms"], LEVELS[state.alarms[0].level][1])
            if is_up and state.failed:
                rows[name]["failed"] = cell(texts["failed"], "red")
        answer = sum(state.state == "reachable" for state in data.values())
        self.say_title(
            Text.assemble(("boxes", "bold"), f"  {answer} of {counted(len(data), 'box', 'es')} answer")
        )
        self.table.show(rows, values)
        self._explain()
        self.offer("lorad hosts")

    def _explain(self) -> None:
        """Say what is wrong with the box under the cursor, in full."""
        state = self._states.get(self.table.key or "", BoxState(""))
        alarmed = alarms_line(state.alarms) if state.alarms else Text()
        self.query_one("#box-says", Line).say(Text(one_line(state.says)) if state.says else alarmed)

    def on_rows_moved(self, event: Rows.Moved) -> None:
        self._explain()

    def on_rows_selected(self, event: Rows.Selected) -> None:
        self.lorad.show_box(event.key)
