"""The nodes of a cluster: who has them, how many devices are free, which bases were loaded there."""

from msgspec import Struct
from rich.text import Text

from lorad.client.client import Client
from lorad.records.pools import NodeStatus, Pool
from lorad.text import age, one_line
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.one_liners import base, counted
from lorad.tui.details.screen import Chosen, DetailScreen, Drawn
from lorad.tui.widgets.columns import TableColumn, TableRow, row_of

_NONE = "No nodes: config.yaml has no cluster, or no pool had one yet."
_STYLES = {"lost": "red", "free": "green"}


class _Seen(Struct, frozen=True):
    nodes: list[NodeStatus]
    pools: list[Pool]


class NodesScreen(DetailScreen):
    NAME = "nodes"
    COLUMNS = (
        TableColumn("node", 6, 24, 0, orders=True, shrinks=12),
        TableColumn("state", 7, 8, 0, orders=True),
        TableColumn("devices", 7, 7, 0, right=True, orders=True),
        TableColumn("free", 4, 5, 0, right=True, orders=True),
        TableColumn("agents", 6, 28, 0, shrinks=12),
        TableColumn("seen", 4, 8, 2, right=True, orders=True),
        TableColumn("bases", 6, 28, 3),
        TableColumn("last word", 8, 80, 1, rest=True),
    )
    LACKS = "No pool of this daemon has the node."
    BINDINGS = bindings("nodes")

    def fetch(self, client: Client, chosen: Chosen) -> _Seen:
        return _Seen(client.nodes(), client.pools())

    def draw(self, fetched: _Seen | None, chosen: Chosen) -> Drawn:
        title = Text("nodes", style="bold")
        if fetched is None:
            return Drawn(title)
        nodes = fetched.nodes
        free = sum(node.free for node in nodes)
        summary = f"{counted(len(nodes), 'node')}, {counted(free, 'device')} free" if nodes else _NONE
        parts = [summary, *(f"{pool.pool} {pool.waiting}" for pool in fetched.pools if pool.waiting)]
        rows = dict[str, TableRow]()
        for node in nodes:
            rows[node.node] = row = row_of(
                {
                    "node": node.node,
                    "state": node.state,
                    "devices": (str(node.count) if node.count else "cpu" if node.devices else "", node.count),
                    "free": (str(node.free) if node.count else "", node.free),
                    "agents": ", ".join(node.agents),
                    "seen": (age(node.seen_at), node.seen_at),
                    "bases": ", ".join(map(base, reversed(node.bases))),
                    "last word": node.says,
                }
            )
            row.cells["state"].style = _STYLES.get(node.state, "")
        agents = {node.node: "".join(node.agents[:1]) for node in nodes}
        opens = {node: ("pool", agent.rpartition("@")[0]) for node, agent in agents.items()}
        above = "\n".join(map(one_line, parts))
        about = {node.node: node.says for node in nodes}
        return Drawn(title, above, "", rows, command="lorad nodes", opens=opens, about=about)
