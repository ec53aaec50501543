"""What a grant says when something of it dies, and what is left on the nodes."""

import time
from collections.abc import Iterator

import pytest

from tests.cluster.faults import AGENT, GCS, GRANT, NODE_FAULTS, Fault, kill, mended
from tests.cluster.hosts import Host
from tests.cluster.measured import Measured
from tests.cluster.ray_kit import Cluster, asked, granted, nothing_left_on


@pytest.fixture
def broken(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Fault]:
    """The fault of this test; its node is whole again afterwards."""
    yield from (request.param for _ in mended(cluster, cluster.nodes[1], request.param))


@pytest.mark.parametrize("broken", NODE_FAULTS, ids=lambda fault: fault.name.replace(" ", "-"), indirect=True)
def test_a_nodes_end_is_told_and_leaves_nothing(
    broken: Fault, cluster: Cluster, machines: list[Host], measured: Measured
) -> None:
    with asked(cluster, f"fault@{NODE_FAULTS.index(broken)}") as grant:
        grant.until("Granted")
        began = time.monotonic()
        broken.does(cluster, cluster.nodes[1])
        assert grant.until("Lost", 15)["node"] == "h2"
        told = time.monotonic() - began
        grant.close()
        nothing_left_on(machines)
        measured.add(broken.name, told, time.monotonic() - began)


def test_a_killed_grant_leaves_nothing(cluster: Cluster, machines: list[Host], measured: Measured) -> None:
    with asked(cluster, "killed@1") as grant:
        grant.until("Granted")
        began = time.monotonic()
        kill(cluster.home, GRANT)
        assert grant.line(10) == {}
        told = time.monotonic() - began
        nothing_left_on(machines)
        measured.add("kill -9 of the grant process", told, time.monotonic() - began)


def test_a_grant_without_agents_ends_itself(cluster: Cluster, machines: list[Host]) -> None:
    with asked(cluster, "empty@1") as grant:
        grant.until("Granted")
        for node in cluster.nodes:
            kill(node, AGENT)
        assert {grant.until("Lost")["node"] for _ in cluster.nodes} == {"h1", "h2"}
        assert grant.line(20) == {}
        assert grant.process.wait(20) == 3
    nothing_left_on(machines)


def test_the_next_life_is_granted_after_a_kill(cluster: Cluster) -> None:
    with asked(cluster, "again@1") as grant:
        grant.until("Granted")
        kill(cluster.home, GRANT)
        with granted(cluster, "again@2") as (_, nodes):
            assert [node["node"] for node in nodes] == ["h1", "h2"]


@pytest.mark.long
def test_the_end_of_ray_leaves_nothing(cluster: Cluster, machines: list[Host], measured: Measured) -> None:
    with asked(cluster, "gcs@1") as grant:
        grant.until("Granted")
        began = time.monotonic()
        kill(cluster.home, GCS)
        while grant.line(120).get("kind") == "Lost":
            pass
        told = time.monotonic() - began
        nothing_left_on(machines)
        measured.add("kill -9 of the GCS (in memory)", told, time.monotonic() - began)
    for node in [cluster.home, *cluster.nodes]:
        cluster.stop(node, force=True)
    cluster.start()
