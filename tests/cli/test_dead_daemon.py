"""A command that finds the socket of a daemon that died starts one; of one that was stopped there is none."""

import socket
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from lorad.box.paths import Home
from lorad.cli.output import doing, hook_transport
from lorad.client import launch
from lorad.client.client import Client
from lorad.client.transport import Transport
from lorad.errors import DaemonUnreachable


@pytest.fixture
def started(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The homes whose daemons were started; none of them answers."""
    for hook in ("on_dead", "on_wait", "on_other_version"):
        monkeypatch.setattr(Transport, hook, None)
    found: list[Path] = []
    monkeypatch.setattr(launch, "start", lambda client: found.append(client.home.root))
    hook_transport(["list"])
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


def test_a_start_that_takes_long_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    clock = count(0.0, 0.5)
    monkeypatch.setattr(Transport, "on_wait", told.append)
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    monkeypatch.setattr(launch, "_START_SECONDS", 3.0)
    assert not launch._await_answer(Client(), None)
    assert told == ["starting the daemon, 1s", "starting the daemon, 2s", ""]


@pytest.mark.parametrize(
    ("words", "is_terminal", "is_told"),
    [
        (["run"], True, True),
        (["run"], False, False),
        (["run", "--json"], True, False),
        (["run", "-q"], True, False),
    ],
)
def test_starts_are_told_on_terminals_alone(
    words: list[str], is_terminal: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hook in ("on_dead", "on_wait", "on_other_version"):
        monkeypatch.setattr(Transport, hook, None)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    hook_transport(words)
    assert (Transport.on_wait is doing) == is_told
