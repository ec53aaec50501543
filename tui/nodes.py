"""Shows the nodes of a cluster: who has them, how many devices are free, which bases were loaded there."""

from collections.abc import Iterable

from msgspec import Struct
from rich.text import Text
from textual.widget import Widget

from lorad.client.client import Client
from lorad.records.pools import NodeStatus, Pool
from lorad.text import age, one_line
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.one_liners import base, counted
from lorad.tui.dashboard.run_rows import cell
from lorad.tui.feed import Changes
from lorad.tui.screens.base import TableScreen
from lorad.tui.widgets.columns import TableColumn, Values
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Cells, Rows

_COLUMNS = (
    TableColumn("node", 6, 24, 0, orders=True, shrinks=12),
    TableColumn("state", 7, 8, 0, orders=True),
    TableColumn("devices", 7, 7, 0, right=True, orders=True),
    TableColumn("free", 4, 5, 0, right=True, orders=True),
    TableColumn("agents", 6, 28, 0, shrinks=12),
    TableColumn("seen", 4, 8, 2, right=True, orders=True),
    TableColumn("bases", 6, 28, 3),
    TableColumn("last word", 8, 80, 1, rest=True),
)
_NONE = "No nodes: config.yaml has no cluster, or no pool had one yet."
_STYLES = {"lost": "red", "free": "green"}


class _Seen(Struct, frozen=True):
    nodes: list[NodeStatus]
    pools: list[Pool]


class NodesScreen(TableScreen):
    TABLE = "nodes"
    BINDINGS = bindings("nodes", "back")
    DEFAULT_CSS = """
    NodesScreen #nodes-about { height: auto; max-height: 4; width: 100%; padding: 0 1; }
    NodesScreen #nodes { height: 1fr; min-height: 3; background: $background; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._agents: dict[str, list[str]] = {}

    def body(self) -> Iterable[Widget]:
        yield Line(id="nodes-about")
        yield Rows(_COLUMNS, id="nodes")

    def on_mount(self) -> None:
        self.say_title(Text("nodes", style="bold"))

    def read(self, client: Client, changes: Changes) -> _Seen:
        return _Seen(client.nodes(), client.pools())

    def show(self, data: _Seen) -> None:
        self._agents = {node.node: node.agents for node in data.nodes}
        free = sum(node.free for node in data.nodes)
        about = f"{counted(len(data.nodes), 'node')}, {counted(free, 'device')} free" if data.nodes else _NONE
        parts = [about, *(f"{pool.pool} {pool.waiting}" for pool in data.pools if pool.waiting)]
        self.query_one("#nodes-about", Line).say("\n".join(map(one_line, parts)))
        rows = dict[str, Cells]()
        values = dict[str, Values]()
        for node in data.nodes:
            texts = {
                "node": node.node,
                "devices": str(node.count) if node.count else "cpu" if node.devices else "",
                "free": str(node.free) if node.count else "",
                "agents": ", ".join(node.agents),
                "seen": age(node.seen_at),
                "bases": ", ".join(map(base, reversed(node.bases))),
                "last word": node.says,
            }
            rows[node.node] = {key: cell(one_line(text)) for key, text in texts.items()}
            rows[node.node]["state"] = cell(node.state, _STYLES.get(node.state, ""))
            values[node.node] = {
                "node": node.node,
                "state": node.state,
                "devices": node.count,
                "free": node.free,
                "seen": node.seen_at,
            }
        self.table.show(rows, values)
        self.offer("lorad nodes")

    def action_pool(self) -> None:
        key = self.table.key
        if agents := self._agents.get(key or ""):
            self.lorad.open("pool", agents[0].rpartition("@")[0])
        else:
            self.notify("No pool of this daemon has the node.", markup=False)

    def on_rows_selected(self, event: Rows.Selected) -> None:
        self.action_pool()
