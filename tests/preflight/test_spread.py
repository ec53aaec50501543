"""Runs over the nodes of a cluster: what cannot be is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from lorad.backends.spread import check_spread, nodes_setup, places
from lorad.box.cluster import Cluster, ClusterNode
from lorad.errors import SpecError
from lorad.preflight.__main__ import preflight
from lorad.spec.model import convert


def cluster(count: int, devices: int = 0) -> Cluster:
    nodes = [ClusterNode(host=f"h{n}", address=f"10.0.0.{n}", devices=devices) for n in range(count)]
    return Cluster(kind="static", nodes=nodes)


SMALL, LARGE = cluster(2), cluster(4, devices=8)
MEGATRON = {"backend": "megatron", "tp": 8, "pp": 2, "dp": 2}
SERVED: dict[str, Any] = {
    "trainer": MEGATRON,
    "rollout": {"backend": "sglang", "tp": 2, "servers": 16},
    "resources": {"nodes": 4, "devices": 32},
}


def check(spec: dict[str, Any], there: Cluster | None, device: str = "cpu", count: int = 1) -> None:
    plain = convert(spec)
    check_spread(plain, there, places(plain, there, device, count))


def two(**spec: Any) -> dict[str, Any]:
    return {"trainer": {"backend": "fsdp", "dp": 2}, "resources": {"nodes": 2}} | spec


@pytest.mark.parametrize(
    ("resources", "device", "expected"),
    [
        ({}, "cpu", ("local",)),
        ({}, "cuda:0", ("local",)),
        ({"devices": 4}, "cuda:0", ("cluster",)),
        ({"devices": 4, "where": "local"}, "cuda:0", ("local",)),
        ({"where": "any"}, "cuda:0", ("local", "cluster")),
        ({"nodes": 2}, "cpu", ("cluster",)),
        ({"where": "cluster"}, "cpu", ("cluster",)),
        ({"rollout_devices": 4}, "cuda:0", ("local",)),
        ({"rollout_devices": 1, "where": "any"}, "cpu", ("local",)),
    ],
)
def test_a_run_goes_where_it_asks(resources: dict[str, Any], device: str, expected: tuple[str, ...]) -> None:
    assert places(convert({"resources": resources}), LARGE, device, 2) == expected


def test_each_node_gives_as_many_devices() -> None:
    check(SERVED, LARGE)
    setup = nodes_setup(convert(SERVED), LARGE)
    assert (setup.nodes, setup.rollout_nodes, setup.devices, setup.bundles) == (4, 0, 8, 4)
    apart = SERVED | {"trainer": MEGATRON | {"dp": 1}, "pool": {"mode": "split"}}
    apart["resources"] = {"nodes": 4, "rollout_nodes": 2, "devices": 32}
    apart["rollout"] = SERVED["rollout"] | {"servers": 8}
    check(apart, LARGE)
    setup = nodes_setup(convert(apart), LARGE)
    assert (setup.nodes, setup.rollout_nodes, setup.devices, setup.bundles) == (2, 2, 8, 4)


APART: dict[str, Any] = {
    "trainer": {"backend": "fsdp", "dp": 4},
    "rollout": {"backend": "vllm", "tp": 2, "servers": 2},
}


def test_servers_have_devices_of_this_machine() -> None:
    for more in ({"pool": {"mode": "split"}}, {"resources": {"rollout_devices": 4, "devices": 4}}):
        check(APART | more, None)
        assert (convert(APART | more).server_devices, convert(APART | more).gpus) == (4, 8)
    assert (convert(APART).server_devices, convert(APART).gpus) == (0, 4)


def test_nodes_without_gpus_give_none() -> None:
    check(two(), SMALL)
    assert nodes_setup(convert(two()), SMALL).devices == 0


@pytest.mark.parametrize(
    ("spec", "there", "says"),
    [
        (two(), None, "resources.nodes: this machine is all there is"),
        (two(resources={"where": "cluster"}), None, "resources.where: this machine is all there is"),
        (two(resources={"nodes": 2, "where": "local"}), SMALL, "resources.where: local, but"),
        (two(trainer={}), SMALL, "trainer.backend: the builtin trainer is a part of its pool's process"),
        (two(trainer={"backend": "fsdp", "dp": 3}), SMALL, "resources.nodes: 3 ranks are not as many"),
        (two(resources={"nodes": 2, "devices": 2}), SMALL, "resources.devices: 2, but the nodes"),
        (two(resources={"nodes": 2, "yield_to": "foreign"}), SMALL, "resources.yield_to: who else"),
        (
            two(resources={"nodes": 2, "rollout_nodes": 1}),
            SMALL,
            "rollout_nodes: nodes for servers",
        ),
        (two(resources={"nodes": 2, "rollout_nodes": 2}), SMALL, "rollout_nodes: 2 of 2 leaves no"),
        (two(pool={"mode": "split"}), SMALL, "pool.mode: split gives servers nodes of their own"),
        (
            two(pool={"mode": "resident"}, resources={"nodes": 2, "rollout_nodes": 1}),
            SMALL,
            "resources.rollout_nodes: 1, but with pool.mode resident",
        ),
        (two(trainer={"backend": "fsdp", "dp": 4}, resources={"nodes": 4}), SMALL, "the cluster has 2 nodes"),
        (
            APART | {"resources": {"rollout_devices": 4}, "pool": {"mode": "timesliced"}},
            None,
            "resources.rollout_devices: 4, but with pool.mode timesliced servers share the devices",
        ),
        (
            APART | {"resources": {"rollout_devices": 4, "nodes": 2}},
            SMALL,
            "resources.rollout_devices: 4, which are devices of this machine",
        ),
        (
            APART | {"resources": {"rollout_devices": 6}},
            None,
            "rollout_devices: 6, but rollout.servers (2) of rollout.tp (2) take 4",
        ),
        ({"pool": {"mode": "split"}}, None, "pool.mode: devices for servers alone, but the builtin engine"),
        (
            {"rollout": {"backend": "vllm", "url": "http://h:1"}, "resources": {"rollout_devices": 1}},
            None,
            "rollout_devices: devices for servers alone, but servers that you run",
        ),
        (two(), LARGE, "rollout.backend: the builtin engine is a part of its pool's process"),
        (SERVED | {"resources": {"nodes": 4, "devices": 30}}, LARGE, "4 nodes do not divide 30 devices"),
        (SERVED | {"resources": {"nodes": 4, "devices": 16}}, LARGE, "8 ranks on each node, but 4 devices"),
        (SERVED | {"resources": {"nodes": 2, "devices": 32}}, LARGE, "cluster has 0 nodes with 16 GPUs"),
        (
            {
                "trainer": {"backend": "megatron", "tp": 8, "pp": 2},
                "rollout": {"backend": "sglang", "servers": 4},
            }
            | {"resources": {"nodes": 4}},
            LARGE,
            "trainer.tp: 8 does not divide the 4 devices of a node",
        ),
        (
            SERVED | {"rollout": {"backend": "sglang", "servers": 6}},
            LARGE,
            "6 servers are not as many on each",
        ),
        (
            SERVED | {"rollout": {"backend": "sglang", "servers": 36}},
            LARGE,
            "36 servers of 1 devices need more",
        ),
        (SERVED | {"algorithm": {"teacher": "/m"}}, LARGE, "algorithm.teacher: the pool's process"),
    ],
)
def test_spreads_that_cannot_be_are_refused(spec: dict[str, Any], there: Cluster | None, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        check(spec, there)
    assert says in str(refused.value) and refused.value.hint


def test_the_preflight_asks_the_cluster_of_the_box(home: Path, tmp_path: Path) -> None:
    small = {"model": {"path": "builtin:tiny"}, "data": {"train": "sort", "prompts_per_step": 4}}
    facts = preflight(convert(small | two()), cwd=tmp_path, backends={}, cluster=SMALL)
    assert facts.parameters and facts.memory_available is None
    with pytest.raises(SpecError, match="has no cluster"):
        preflight(convert(small | two()), cwd=tmp_path, backends={})
