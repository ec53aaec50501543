"""What a grant says and does over a real Ray cluster, before anything fails."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.faults import send
from tests.cluster.hosts import Host, until
from tests.cluster.ray_kit import PATIENCE, Cluster, Line, asked, granted, left_on, nothing_left_on

GROUPS = (
    "from ray.util import placement_group_table as table\n"
    "said = [group['name'] for group in table().values() if group['state'] == 'CREATED']"
)


class TestTwoGrants:
    @pytest.fixture(scope="class")
    @classmethod
    def second(cls, cluster: Cluster) -> Iterator[tuple[str, list[Line]]]:
        """What a grant said while another had the nodes, and of the nodes that it has now."""
        with granted(cluster, "first@1") as (first, _), asked(cluster, "beta@7") as second:
            waiting = second.line()["words"]
            first.close()
            yield waiting, second.until("Granted")["nodes"]

    @pytest.fixture
    def nodes(self, second: tuple[str, list[Line]]) -> list[Line]:
        return second[1]

    def test_a_second_grant_says_what_is_lacking(self, second: tuple[str, list[Line]]) -> None:
        assert second[0] == "2 x 2 GPUs: 3 nodes alive, 0 GPUs free"

    def test_two_nodes_are_granted_in_order(self, cluster: Cluster, nodes: list[Line]) -> None:
        assert [node["node"] for node in nodes] == ["h1", "h2"]
        assert [node["ip"] for node in nodes] == [node.ip for node in cluster.nodes]
        assert [node["devices"] for node in nodes] == [["0", "1"], ["0", "1"]]
        assert len({node["boot_id"] for node in nodes}) == 2
        assert {node["certificate"] for node in nodes} == {"PEM of the pool"}

    def test_agents_get_nothing_secret(self, cluster: Cluster, nodes: list[Line]) -> None:
        assert cluster.token_file.read_text() not in json.dumps(nodes)
        assert {key for node in nodes for key in node["start"]} == {"certificate", "devices"}
        assert [
            name for node in nodes for name in node["environment"] if name.startswith(("RAY_", "CUDA_"))
        ] == []

    @pytest.mark.usefixtures("nodes")
    def test_the_group_is_named_by_its_life(self, cluster: Cluster) -> None:
        """It is gone with the grant: see `test_the_end_of_the_pool_ends_all`."""
        assert cluster.asked_of_ray(GROUPS) == ["lorad/beta@7"]


def test_what_no_node_has_is_waited_for(cluster: Cluster) -> None:
    with asked(cluster, "huge@1", devices=8) as grant:
        words = "2 x 8 GPUs: 3 nodes alive, 0 large enough, 4 GPUs free"
        assert grant.line() == {"kind": "Waiting", "words": words}
    assert grant.process.returncode == 0


def test_a_label_that_no_node_has_waits(cluster: Cluster) -> None:
    with asked(cluster, "labels@1", labels={"kind": "H100"}) as grant:
        assert grant.line()["words"].startswith("2 x 2 GPUs (kind: H100): 3 nodes alive, 0 large enough")


def test_a_labelled_node_is_granted(cluster: Cluster) -> None:
    for node in cluster.nodes:
        life = f"labelled-{node.name}@1"
        with granted(cluster, life, nodes=1, labels={"host": node.name}) as (_, (found,)):
            assert found["node"] == node.name


def test_nodes_that_had_the_base_come_first(cluster: Cluster) -> None:
    first, second = cluster.nodes
    with granted(cluster, "busy@1", nodes=1, warm=[second.ip]) as (_, (found,)):
        assert found["node"] == second.name
        with asked(cluster, "beside@1", nodes=1, warm=[second.ip]) as grant:
            (beside,) = grant.until("Granted")["nodes"]
        assert beside["node"] == first.name  # the other one has no room, and is not waited for
    with granted(cluster, "warm@1", nodes=1, warm=[first.ip]) as (_, (found,)):
        assert found["node"] == first.name  # not as Ray chooses by itself, one node or the other each time


def test_a_wrong_token_is_refused(cluster: Cluster) -> None:
    wrong = cluster.written_token("wrong", "cd" * 32)
    with asked(cluster, "token@1", token_file=str(wrong)) as grant:
        said = grant.until("Refused")
        assert said["words"] == f"Ray at {cluster.address} refuses the token of {wrong}"
        assert "cluster.token_file" in said["hint"]


def test_a_missing_token_is_refused(cluster: Cluster) -> None:
    with asked(cluster, "none@1", env={"HOME": "/nowhere"}, token_file="") as grant:
        assert grant.until("Refused")["words"] == f"Ray at {cluster.address} asks for a token"


def test_a_token_others_read_is_refused(cluster: Cluster) -> None:
    readable = cluster.written_token("readable", "ab" * 32, mode=0o644)
    with asked(cluster, "mode@1", token_file=str(readable)) as grant:
        assert grant.until("Refused")["hint"] == f"chmod 600 {readable}"


def test_a_cluster_that_is_silent_is_waited_for(cluster: Cluster) -> None:
    silent = f"{cluster.home.ip}:6399"
    with asked(cluster, "silent@1", address=silent) as grant:
        assert grant.line() == {"kind": "Waiting", "words": f"Ray does not answer at {silent}"}
    assert grant.process.returncode == 0


def test_an_agent_that_fails_says_why(cluster: Cluster) -> None:
    only = {"nodes": 1, "labels": {"host": "h1"}}
    with asked(cluster, "fail@1", argv=["--fail", "no module named lorad"], **only) as grant:
        assert grant.until("Refused")["words"] == "no agent starts on h1: lorad: no module named lorad"
        nothing_left_on([cluster.home, *cluster.nodes])


def test_a_missing_interpreter_is_named(cluster: Cluster) -> None:
    with asked(cluster, "python@1", nodes=1, python="/opt/nothing/python") as grant:
        assert "cannot start /opt/nothing/python: No such file" in grant.until("Refused")["words"]


def test_the_end_of_the_pool_ends_all(cluster: Cluster, machines: list[Host]) -> None:
    with granted(cluster, "end@1") as (grant, _):
        # the grant; on two nodes an actor, which changes its title, an agent and its child
        until(lambda: len(left_on(machines)) == 7, "seven processes of a grant")
        grant.close()
        nothing_left_on(machines, seconds=5.0)
    assert cluster.asked_of_ray(GROUPS) == []


def test_a_grant_without_agents_ends_itself(cluster: Cluster, machines: list[Host]) -> None:
    with asked(cluster, "empty@1") as grant:
        grant.until("Granted")
        for node in cluster.nodes:
            send(node, "stub_agent")
        lost = [grant.until("Lost") for _ in cluster.nodes]
        assert {said["node"] for said in lost} == {"h1", "h2"}
        assert {said["how"] for said in lost} == {"its agent was killed by SIGKILL"}
        assert grant.line() == {} and grant.process.wait(PATIENCE) == 3
    nothing_left_on(machines)


def test_the_next_life_is_granted_after_a_kill(cluster: Cluster) -> None:
    with asked(cluster, "again@1") as grant:
        grant.until("Granted")
        send(cluster.home, "lorad.grants.ray")
        with granted(cluster, "again@2") as (_, nodes):
            assert [node["node"] for node in nodes] == ["h1", "h2"]


def test_a_servers_node_is_granted_again(cluster: Cluster) -> None:
    with granted(cluster, "split@1", nodes=1, rollout_nodes=1) as (grant, nodes):
        assert [node["node"] for node in nodes] == ["h1", "h2"]
        send(cluster.nodes[1], "stub_agent")
        assert grant.until("Lost")["node"] == "h2"
        (again,) = grant.until("Granted")["nodes"]
        assert again["node"] == "h2" and again["pid"] != nodes[1]["pid"]


def test_a_node_with_ranks_is_not_replaced(cluster: Cluster) -> None:
    with granted(cluster, "ranks@1", nodes=1, rollout_nodes=1) as (grant, _):
        for node in cluster.nodes:
            send(node, "stub_agent")
            assert grant.until("Lost")["node"] == node.name
        assert grant.line() == {}
