"""What ends when something of a pool over two nodes of a Ray cluster dies, and when the pool knows."""

import time
from collections.abc import Iterator

import pytest

from tests.cluster.faults import AGENT, ALL, FAULTS, GCS, HEAD, Fault, send
from tests.cluster.hosts import Host
from tests.cluster.measured import Measured
from tests.cluster.ray_kit import Cluster, Head, nothing_left_on

SECONDS = 15.0  # within which nothing is left anywhere


def case(fault: Fault) -> object:
    marks = [] if fault.is_quick else [pytest.mark.long]
    return pytest.param(fault, id=fault.name.replace(" ", "-"), marks=marks)


@pytest.fixture
def head(cluster: Cluster) -> Iterator[Head]:
    """A pool with one rank on each of two nodes, which trains."""
    head = Head(cluster)
    try:
        assert head.line()["nodes"] == ["h1", "h2"], head.log.read_text()
        yield head
    finally:
        head.end()


@pytest.fixture
def fault(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Fault]:
    """A fault; the second node is in the cluster again afterwards."""
    yield request.param
    if request.param.loses_node:
        node = cluster.nodes[1]
        if any("ray" in line for line in node.processes().values()):  # not after a power cut
            cluster.stop(node, force=True)
        cluster.join([node])


@pytest.mark.usefixtures("turn")
@pytest.mark.parametrize("fault", [case(fault) for fault in FAULTS], indirect=True)
def test_nothing_is_left_after_a_fault(
    fault: Fault, head: Head, cluster: Cluster, machines: list[Host], measured: Measured
) -> None:
    began = time.monotonic()
    fault.does(cluster, cluster.nodes[1])
    try:
        ended = head.ended_after(began)
        nothing_left_on(machines, [mark for mark in ALL if mark not in fault.keeps], SECONDS)
        gone = time.monotonic() - began
    finally:
        if fault.undo:
            fault.undo(cluster, cluster.nodes[1])
    nothing_left_on(machines, ALL, SECONDS)
    but = " (but the pool, until it is killed)" if HEAD in fault.keeps else ""
    seconds, why = ended() or ("it is the pool itself", "")
    assert fault.says in why
    measured.add(fault.name, seconds, gone, but)


# in CI a node that loses its power is named
@pytest.mark.long
def test_the_pool_says_which_node_it_lost(head: Head, cluster: Cluster) -> None:
    send(cluster.nodes[1], AGENT)
    said = head.line()
    assert said["kind"] == "ended" and "h2" in said["why"], said


@pytest.mark.long
@pytest.mark.usefixtures("turn")
def test_the_end_of_ray_leaves_nothing(
    head: Head, cluster: Cluster, machines: list[Host], measured: Measured
) -> None:
    began = time.monotonic()
    send(cluster.home, GCS)
    assert head.line()["kind"] == "ended"
    told = time.monotonic() - began
    nothing_left_on(machines, ALL, SECONDS)
    measured.add("kill -9 of the GCS (in memory)", told, time.monotonic() - began)
    for node in [cluster.home, *cluster.nodes]:
        cluster.stop(node, force=True)
    cluster.start()
