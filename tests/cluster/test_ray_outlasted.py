"""What a pool over nodes of a Ray cluster lives through: no room on a node, the loss of a node of servers."""

import time
from collections.abc import Iterator

import pytest

from tests.cluster.faults import AGENT, ALL, RANK, RAYLET, pids, send
from tests.cluster.hosts import Host
from tests.cluster.measured import Measured
from tests.cluster.ray_kit import Cluster, Head, nothing_left_on

SPLIT = "split_head.py"
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("turn")]


@pytest.fixture
def split(cluster: Cluster, machines: list[Host]) -> Iterator[Head]:
    """A pool with a rank on one node and a server on another."""
    head = Head(cluster, SPLIT, nodes=1, rollout_nodes=1)
    try:
        yield head
    finally:
        head.end()
        nothing_left_on(machines, [*ALL, SPLIT, "stub_server.py"])


def test_a_full_node_is_named(cluster: Cluster, measured: Measured) -> None:
    """What cannot be put there is refused; the pool works on, and it is put once there is room."""
    head = Head(cluster)
    try:
        assert head.line()["kind"] == "ready"
        (head.directory / "files").touch()
        head.until("loaded")
        with cluster.nodes[1].full():
            began = time.monotonic()
            why = head.until("refused")["why"]
            told = time.monotonic() - began
        assert why.startswith("h2: ") and "No space left on device" in why
        head.until("loaded")
        measured.add("no room on a node", told, "nothing ends; the next put succeeds once there is room")
    finally:
        head.end()


@pytest.mark.parametrize("victim", [AGENT, RAYLET])
def test_a_lost_server_node_returns(split: Head, cluster: Cluster, measured: Measured, victim: str) -> None:
    """The trainer's node is not touched; the server is started in its bundle again, which Ray has to place
    anew where the node was lost with its raylet.
    """
    first = split.until("server", state="up")
    assert first["node"] == "h2"
    rank = pids(cluster.nodes[0], RANK)
    began = time.monotonic()
    send(cluster.nodes[1], victim)
    split.until("server", state="failed")
    lost = time.monotonic() - began
    if victim == RAYLET:
        cluster.stop(cluster.nodes[1], force=True)
        cluster.join([cluster.nodes[1]])
        began = time.monotonic()
    back = split.until("server", state="up", node="h2")
    served = time.monotonic() - began
    assert back["agent"] != first["agent"]
    assert rank and pids(cluster.nodes[0], RANK) == rank
    what = "raylet" if victim == RAYLET else "agent"
    but = ": the server serves again" + (", from the return of Ray on" if victim == RAYLET else "")
    measured.add(f"kill -9 of the {what} on the only node of servers", lost, served, but)
