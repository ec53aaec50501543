"""lorad nodes, and logs of one node."""

import sys

import pytest

from lorad.cli.app import app
from lorad.client.client import Client
from lorad.errors import SpecError
from lorad.records.pools import NodeStatus
from lorad.records.runs import LogPart

LOG = "h1: rank 0 is ready\nh2: rank 1 is ready\nthe pool is up\nh1: step 1\nh1: half a li"


@pytest.fixture(autouse=True)
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    part = LogPart(LOG, len(LOG), len(LOG))
    monkeypatch.setattr(Client, "logs", lambda self, run, **of: part)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(list(arguments), standalone_mode=False)
    return capsys.readouterr().out


def test_logs_of_a_node_are_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "logs", "a", "--of", "trainer", "--node", "h1")
    assert found == "rank 0 is ready\nstep 1\nhalf a li\n"
    assert printed(capsys, "logs", "a", "--of", "trainer", "--node", "h1", "-n", "1") == "half a li\n"
    assert printed(capsys, "logs", "a", "--of", "trainer", "--node", "h") == ""


def test_a_node_needs_one_log_of_a_run() -> None:
    with pytest.raises(SpecError, match="--node chooses lines of one log"):
        app(["logs", "a", "--node", "h1"], standalone_mode=False)


def test_nodes_say_what_is_free(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    there = [NodeStatus("h1", state="granted", count=8, free=0, agents=["a-1@1"], bases=["/m/one", "/m/two"])]
    monkeypatch.setattr(Client, "nodes", lambda self: there)
    monkeypatch.setattr(Client, "pools", lambda self: [])
    header, row = printed(capsys, "nodes").splitlines()
    assert header.split("\t") == ["node", "state", "devices", "free", "agents", "seen", "bases", "last word"]
    assert row.split("\t")[:5] == ["h1", "granted", "8", "0", "a-1@1"] and "two, one" in row


def test_no_nodes_say_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Client, "nodes", lambda self: [])
    monkeypatch.setattr(Client, "pools", lambda self: [])
    app(["nodes"], standalone_mode=False)
    assert "config.yaml has no cluster" in capsys.readouterr().err
