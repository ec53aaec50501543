"""What pools, grants and agents say to each other."""

import json

import msgspec

from lorad.protocol.nodes import (
    GRANT,
    AgentStart,
    Granted,
    GrantedNode,
    GrantLine,
    GrantRequest,
    GrantStatus,
    LostNode,
    NodesKind,
    NodesSetup,
    PlacedNode,
    Refused,
    StaticNode,
    WaitingGrant,
)
from lorad.protocol.pool_setup import PoolSetup

NODES = NodesSetup(nodes=2, devices=1, hosts=(StaticNode(name="h1", address="10.0.0.1"),))


def _pool(nodes: NodesSetup | None) -> PoolSetup:
    return PoolSetup(pool="p", model="m", model_path="/m", nodes=nodes)


def test_a_grant_line_names_its_kind() -> None:
    line = msgspec.json.encode(WaitingGrant("0 of 2 nodes are free"))
    assert json.loads(line) == {"kind": "Waiting", "words": "0 of 2 nodes are free"}
    assert msgspec.json.decode(line, type=GrantLine) == WaitingGrant("0 of 2 nodes are free")


def test_pools_over_other_nodes_are_others() -> None:
    keys = {
        _pool(None).key,
        _pool(NODES).key,
        _pool(msgspec.structs.replace(NODES, nodes=1, rollout_nodes=1)).key,
    }
    assert len(keys) == 3


def test_groups_of_pools_may_differ() -> None:
    assert _pool(NODES).key == _pool(msgspec.structs.replace(NODES, group="lorad/other")).key


def test_setup_survives_the_file() -> None:
    pool = _pool(NODES)
    assert msgspec.json.decode(msgspec.json.encode(pool), type=PoolSetup) == pool


def test_each_side_reads_what_the_other_wrote() -> None:
    start = AgentStart(certificate="PEM", devices=("0",))
    told = GrantedNode(
        node="h1",
        ip="10.0.0.1",
        port=1,
        certificate="PEM",
        boot_id="b",
        directory="/d",
        pid=1,
        lorad="0",
        uid=0,
    )
    request = GrantRequest(
        setup=NODES, life="p@1", socket="/s", certificate="PEM", agent=("-m", "lorad.nodes.agent")
    )
    for said in (start, request, Granted((told,)), Refused("no room", "wait"), LostNode("h1", "is gone")):
        kind = type(said)
        assert msgspec.json.decode(msgspec.json.encode(said), type=kind) == said
    kinds: tuple[NodesKind, ...] = ("static", "ray")
    assert NODES.kind in kinds and NODES.bundles == 2


def test_grants_on_disk_are_read_again() -> None:
    status = GrantStatus(state="asked", words="0 of 2 nodes are free", since=1.0)
    assert (
        GRANT == "grant.json" and msgspec.json.decode(msgspec.json.encode(status), type=GrantStatus) == status
    )
    placed = PlacedNode(node="h1", boot_id="b", devices=("0",))
    assert msgspec.to_builtins(placed) == {"node": "h1", "boot_id": "b", "devices": ("0",), "software": ""}
