"""lorad doctor --cluster: a grant, and a look at every node."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from lorad.grants import probe
from lorad.protocol.nodes import NodesSetup, StaticNode
from tests.kit.world import REPOSITORY, world

NODES = [{"host": f"h{number}", "address": f"127.0.0.{number}"} for number in (1, 2)]


@pytest.mark.system
def test_every_node_is_looked_at() -> None:
    with world() as made:
        made.home.root.mkdir(mode=0o700)
        backends = {"sglang": {"python": "/no/such/python"}, "vllm": {"python": sys.executable}}
        config = {"cluster": {"kind": "static", "nodes": NODES}, "backends": backends}
        made.home.config.write_text(json.dumps(config))
        found = made.json("doctor", "--cluster", expect=1)
        wrong = [(one["name"], one["detail"]) for one in found if not one["ok"]]
        assert wrong == [(f"h{n}", "/no/such/python is no Python that works") for n in (1, 2)]
        fine = [one["detail"] for one in found if one["ok"] and one["name"] == "h2"]
        assert any("10.0 MiB arrived whole" in detail for detail in fine)
        assert any(detail.endswith("GPUs seen") for detail in fine)
        assert "builtin:tiny has the weights of this machine's" in fine


def test_without_a_cluster_it_says_so() -> None:
    with world() as made:
        (found,) = made.json("doctor", "--cluster", expect=1)
        assert found["detail"].endswith("config.yaml has none") and "docs/cluster.md" in found["hint"]


def test_a_grant_that_does_not_come_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr("tempfile.tempdir", str(home))
    hosts = (
        StaticNode(name="h1", address="127.0.0.1"),
        StaticNode(name="h2", address="127.0.0.2", command=("/no/such/ssh", "h2")),
    )
    asked = probe.Asked(setup=NodesSetup(nodes=2, hosts=hosts), seconds=5.0)
    probe.main([msgspec.json.encode(asked).decode()])
    (line,) = capsys.readouterr().out.splitlines()
    finding = json.loads(line)["check"]
    assert not finding["ok"] and "1 of 2 nodes are free; h2: " in finding["detail"]
