"""A command that finds the socket of a daemon that died starts one; of one that was stopped there is none."""

import socket
from pathlib import Path

import pytest

from lorad.box.paths import Home
from lorad.cli.output import start_dead_daemons
from lorad.client import launch
from lorad.client.client import Client
from lorad.client.transport import Transport
from lorad.errors import DaemonUnreachable


@pytest.fixture
def started(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The homes whose daemons were started; none of them answers."""
    monkeypatch.setattr(Transport, "on_dead", None)
    found: list[Path] = []
    monkeypatch.setattr(launch, "start", lambda client: found.append(client.home.root))
    start_dead_daemons()
    return found


def test_a_daemon_that_died_is_started(
    home: Path, started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    Home(home).socket.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(Home(home).socket))
    for _ in range(2):
        with pytest.raises(DaemonUnreachable):
            Client().status()
    assert started == [home, home]
    assert "The daemon has died: it is started again." in capsys.readouterr().err


def test_a_daemon_that_was_stopped_stays_so(home: Path, started: list[Path]) -> None:
    with pytest.raises(DaemonUnreachable) as refused:
        Client().status()
    assert started == [] and "`lorad daemon start`" in refused.value.hint
