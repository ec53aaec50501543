"""The nodes of a cluster: who has them, how many devices are free, which bases were loaded there."""

from msgspec import Struct
from rich.text import Text
from textual.geometry import Size

from lorad.records.pools import NodeStatus, Pool
from lorad.text import age, one_line
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.one_liners import base, counted
from lorad.tui.dashboard.run_rows import cell
from lorad.tui.details.screen import Chosen, DetailKind, DetailScreen, Drawn
from lorad.tui.widgets.columns import TableColumn, Values
from lorad.tui.widgets.table import Cells

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


class _NodesScreen(DetailScreen):
    BINDINGS = bindings("nodes")


def nodes() -> DetailScreen:
    return _NodesScreen(
        DetailKind(
            "nodes",
            _COLUMNS,
            lambda client, _: _Seen(client.nodes(), client.pools()),
            _draw,
            "No pool of this daemon has the node.",
        )
    )


def _draw(seen: _Seen | None, _chosen: Chosen, _size: Size) -> Drawn:
    title = Text("nodes", style="bold")
    if seen is None:
        return Drawn(title)
    free = sum(node.free for node in seen.nodes)
    summary = f"{counted(len(seen.nodes), 'node')}, {counted(free, 'device')} free" if seen.nodes else _NONE
    parts = [summary, *(f"{pool.pool} {pool.waiting}" for pool in seen.pools if pool.waiting)]
    rows = dict[str, Cells]()
    values = dict[str, Values]()
    for node in seen.nodes:
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
    agents = {node.node: "".join(node.agents[:1]) for node in seen.nodes}
    opens = {node: ("pool", agent.rpartition("@")[0]) for node, agent in agents.items()}
    above = "\n".join(map(one_line, parts))
    about = {node.node: node.says for node in seen.nodes}
    return Drawn(title, above, "", rows, values, command="lorad nodes", opens=opens, about=about)
