"""`cluster:` of config.yaml: each key is checked, and refused in words."""

from pathlib import Path

import pytest

from lorad.box.config import load
from lorad.errors import SpecError

TWO = "kind: static, nodes: [{host: h1, address: 10.0.0.1, agent: ssh h1, devices: 8}, {host: 10.0.0.2}]"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def test_without_a_cluster_there_is_none(path: Path) -> None:
    path.write_text("idle_timeout: 5")
    assert load(path).cluster is None


def test_static_nodes_are_read(path: Path) -> None:
    path.write_text(f"cluster: {{{TWO}, lease: 2}}")
    cluster = load(path).cluster
    assert cluster is not None and cluster.has_gpus and cluster.lease == 2
    assert [(node.ip, node.command, node.devices) for node in cluster.nodes] == [
        ("10.0.0.1", ("ssh", "h1"), 8),
        ("10.0.0.2", (), 0),
    ]
    assert [cluster.suited(devices) for devices in (0, 8, 9)] == [2, 1, 0]


def test_ray_knows_its_own_nodes(path: Path) -> None:
    path.write_text("cluster: {kind: ray, python: /opt/ray/bin/python, labels: {accelerator: H100}}")
    cluster = load(path).cluster
    assert cluster is not None and cluster.has_gpus and cluster.suited(8) is None


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("kind: slurm", "Invalid enum value 'slurm'"),
        ("kind: ray", "cluster.python is missing"),
        (f"{TWO}, python: /opt/ray/bin/python", "cluster.python is for kind ray"),
        (f"{TWO}, insecure: true", "cluster.insecure is for kind ray"),
        ("kind: ray, python: /a, nodes: [{host: 10.0.0.1}]", "cluster.nodes are for kind static"),
        ("kind: ray, python: ray/bin/python", "expected an absolute path"),
        ("kind: static", "cluster.nodes is empty"),
        ("kind: static, nodes: [{host: h1}]", "h1 has no IP: give address"),
        ("kind: static, nodes: [{host: h1, address: h1.example}]", "h1 has no IP"),
        ("kind: static, nodes: [{host: h1, address: 10.0.0.1, agent: 'ssh \"h1'}]", "is no command"),
        ("kind: static, nodes: [{host: 10.0.0.1}, {host: 10.0.0.1}]", "two nodes of the cluster are called"),
        (f"{TWO}, lease: 0", "Expected `float` > 0"),
        (f"{TWO}, patients: 5", "unknown field `patients`"),
        (f"{TWO}, interface: 'eth0; rm'", "Expected `str` matching regex"),
    ],
)
def test_wrong_clusters_are_refused(path: Path, cluster: str, says: str) -> None:
    path.write_text(f"cluster: {{{cluster}}}")
    with pytest.raises(SpecError) as refused:
        load(path)
    assert says in refused.value.message and refused.value.hint
