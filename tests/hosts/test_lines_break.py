"""Masters, connections and daemons that die are told, or mended; no daemon ever starts here.

The cases with a real sshd have mark.system.
"""

import os
import signal

import pytest

from lorad.client.boxes import remote
from lorad.client.boxes.entry import BoxEntry
from lorad.client.boxes.remote import FarHome, LineLost
from lorad.client.client import Client
from lorad.errors import DaemonUnreachable, HostUnreachable, NotFound
from tests.hosts.conftest import REAL, Box, asking


@pytest.fixture
def client(box: Box, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client in this process that asks the box, whose daemon runs."""
    return asking(box, monkeypatch)


@pytest.mark.system
@REAL
def test_a_killed_master_is_replaced(box: Box, client: Client) -> None:
    client.status()
    before = box.master()
    box.kill("master")
    assert client.status().home == str(box.far.home.root)
    assert box.master() != before
    box.kill("master")
    with pytest.raises(NotFound, match="no run named nobody"):  # it went out once, over a new line
        client.rename("nobody", "other")


def test_a_line_that_slept_is_opened_anew(box: Box, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    if not box.is_real:
        pytest.skip("a fake ssh has no process there")
    client.status()
    box.kill("master")
    quick = tuple(word.replace("Interval=15", "Interval=1") for word in remote._MASTER)
    assert quick != remote._MASTER
    monkeypatch.setattr(remote, "_MASTER", quick)
    client.status()
    before = box.master()
    with box.asleep():
        assert client.status().home == str(box.far.home.root)
    assert box.master() != before
    with box.asleep(), pytest.raises(LineLost, match="may have been carried out"):
        client.rename("nobody", "other")
    assert client.status().home == str(box.far.home.root)


@pytest.mark.system
def test_a_broken_answer_is_told(box: Box, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.status()

    def broken(answer: object) -> bytes:
        box.kill("master")
        raise EOFError("3 of 9 bytes came")

    monkeypatch.setattr("lorad.client.transport._HttpAnswer.read", broken)
    with pytest.raises(DaemonUnreachable, match="the line to h2, or the daemon there, went away") as refused:
        client.status()
    assert "the line is opened anew" in refused.value.hint


@pytest.mark.system
def test_a_dead_daemon_is_not_started_here(box: Box, client: Client) -> None:
    os.kill(client.status().pid, signal.SIGKILL)
    with pytest.raises(DaemonUnreachable, match="no daemon runs on h2") as refused:
        client.status()
    assert "`lorad --host h2 daemon start`" in refused.value.hint
    refused_command = box.there("list", expect=5)
    assert "no daemon runs on h2" in refused_command.stderr
    assert box.stopped_daemons()


def test_run_starts_the_daemon_there(box: Box, client: Client) -> None:
    os.kill(client.status().pid, signal.SIGKILL)
    (box.here / "work/spec.yaml").write_text("data: {train: sort, prompts_per_step: 2}\n")
    box.there("check", "spec.yaml")
    assert client.status().home == str(box.far.home.root)
    assert box.stopped_daemons()


def test_a_broken_verb_is_not_repeated(box: Box, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.status()
    asked: list[str] = []

    def broken(transport: object, method: str, path: str, data: bytes) -> None:
        asked.append(method)
        raise EOFError("the connection was closed")

    monkeypatch.setattr("lorad.client.transport.Transport._asked", broken)
    with pytest.raises(LineLost, match="may have been carried out"):
        client.rename("one", "other")
    with pytest.raises(LineLost, match="carries nothing"):
        client.status()
    assert asked == ["POST", "GET", "GET"]


@pytest.mark.parametrize(
    ("says", "remedy"),
    [
        ("Host key verification failed.", "answer what it asks about the host's key"),
        ("ann@box: Permission denied (publickey).", "with a key, an agent or a password"),
        ("ssh: Could not resolve hostname box", "~/.ssh/config may name the address"),
        ("ssh: connect to host box port 22: Connection refused", "is the machine up?"),
    ],
)
def test_what_ssh_says_has_a_remedy(box: Box, says: str, remedy: str) -> None:
    there = FarHome("h9", BoxEntry("box"))
    refused = there._refusal(255, says)
    assert remedy in refused.hint and says[-20:] in refused.message


def test_a_missing_lorad_is_named(box: Box) -> None:
    box.add("bare", lorad="/nowhere/lorad")
    refused = box.lorad("--host", "bare", "list", expect=5)
    assert "/nowhere/lorad is not found on bare" in refused.stderr and "--lorad" in refused.stderr


def test_an_older_lorad_is_named(box: Box) -> None:
    box.add("old", lorad="/bin/false")
    refused = box.lorad("--host", "old", "list", expect=5)
    assert "may be of an older version" in refused.stderr


def test_another_protocol_names_the_box(box: Box, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.client.boxes.remote.PROTOCOL", 7)
    there = client.where
    assert isinstance(there, FarHome)
    with pytest.raises(HostUnreachable, match=r"lorad on h2 .* speaks protocol 1"):
        there.open(anew=True)
