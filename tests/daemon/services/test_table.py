"""The table of services: a row and a program are all that another service costs."""

import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest
from msgspec import Struct

from lorad.box.config import Supervision
from lorad.daemon import health
from lorad.daemon.context import Context
from lorad.daemon.process.processes import attempts_under, read_status
from lorad.daemon.services import loggers, service, table
from lorad.daemon.services.service import OWN, Failure, Service, ServiceProcess, Upkeep, on_table, stop
from lorad.daemon.troubles import Item
from lorad.errors import StorageError
from lorad.loggers.table import FollowedRun
from lorad.protocol.tables import STATE, read_state
from lorad.store import runs
from tests.kit import daemon_world
from tests.kit.daemon_world import open_context, reconciling, until

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from lorad.box.paths import AttemptDir
from lorad.protocol.heartbeat import HEART

HEART.start(AttemptDir(Path(os.environ["LORAD_ATTEMPT"])).heartbeat)
while True:
    words = json.loads((Path(sys.argv[1]) / "table.json").read_bytes())["words"]
    state = Path(sys.argv[2]) / "state.json"
    state.with_suffix(".tmp").write_text(json.dumps({"words": [word.upper() for word in words]}))
    state.with_suffix(".tmp").rename(state)
    time.sleep(0.05)
"""


class Words(Struct, frozen=True):
    """What the echo is to say, and what it says."""

    words: list[str] = []


class Echo:
    """A service that shouts what it is given; what it shouts is a trouble."""

    def __init__(self) -> None:
        self.words: list[str] = ["hello"]
        self.upkeep: Upkeep = "up"
        self.row = Service("echo", "the echo", self.look, on_table, self.table, self.take)

    def look(self, ctx: Context) -> dict[int, Upkeep]:
        return {OWN: self.upkeep}

    def table(self, ctx: Context, process: ServiceProcess) -> Words:
        return Words(self.words)

    def take(self, ctx: Context, process: ServiceProcess) -> list[Failure]:
        said = read_state(process.work / STATE, Words).words
        return [Failure(Item("a word"), word, "Say another.") for word in said]


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Echo:
    """Add the service to the table, and name its program."""
    (tmp_path / "echo.py").write_text(PROGRAM)
    echo = Echo()
    programs = {**daemon_world.COMMANDS.services, "echo": (sys.executable, str(tmp_path / "echo.py"))}
    monkeypatch.setattr(
        daemon_world, "COMMANDS", dataclasses.replace(daemon_world.COMMANDS, services=programs)
    )
    monkeypatch.setattr(table, "SERVICES", (*table.SERVICES, echo.row))
    return echo


def pid_of_echo(home: Path) -> int:
    lives = list(attempts_under(home / "echo"))
    return ((read_status(lives[-1]) if lives else None) or {}).get("pid") or 0


def is_alive(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()


def says(ctx: Context, line: str) -> bool:
    return line in ctx.loop.troubles.lines()


async def test_a_new_row_is_a_service(home: Path, echo: Echo) -> None:
    async with reconciling(home) as ctx:
        await until(lambda: says(ctx, "a word: HELLO. Say another."))
        echo.words = ["again"]
        await until(lambda: says(ctx, "a word: AGAIN. Say another.") and len(ctx.loop.troubles) == 1)
        first = pid_of_echo(home)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of_echo(home) not in (0, first))
        second = pid_of_echo(home)
    async with reconciling(home) as ctx:
        await until(lambda: says(ctx, "a word: AGAIN. Say another."))
        assert pid_of_echo(home) == second and is_alive(second)
        os.kill(second, signal.SIGKILL)  # who adopted it notices as well
        await until(lambda: pid_of_echo(home) not in (0, second))
        echo.upkeep = "away"
        await until(lambda: not is_alive(pid_of_echo(home)) and not len(ctx.loop.troubles))
    lives = {attempt.root.name: read_status(attempt) for attempt in attempts_under(home / "echo")}
    signals = {number: status["signal"] for number, status in lives.items() if status}
    assert signals == {"0001": signal.SIGKILL, "0002": signal.SIGKILL, "0003": signal.SIGTERM}


async def test_any_hung_service_is_replaced(home: Path, echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.1)
    async with reconciling(home, supervision=Supervision(hang=2.0)) as ctx:
        await until(lambda: ctx.processes.pulses)
        pid = pid_of_echo(home)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: not is_alive(pid) and pid_of_echo(home) not in (0, pid))


async def test_broken_service_holds_up_no_other(
    home: Path, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(ctx: Context) -> dict[int, Upkeep]:
        raise OSError(5, "Input/output error", "/echo")

    broken = dataclasses.replace(echo.row, name="broken", title="the broken one", look=look)
    monkeypatch.setattr(table, "SERVICES", (broken, *table.SERVICES))
    async with reconciling(home) as ctx:
        await until(lambda: says(ctx, "the broken one: /echo: Input/output error"))
        await until(lambda: says(ctx, "a word: HELLO. Say another."))


async def test_a_stubborn_process_is_killed(home: Path, echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_TERM_SECONDS", 0.2)
    async with reconciling(home) as ctx:
        await until(lambda: says(ctx, "a word: HELLO. Say another."))
        pid = pid_of_echo(home)
        os.kill(pid, signal.SIGSTOP)
        echo.upkeep = "away"
        await until(lambda: not is_alive(pid))


async def test_a_table_that_is_gone_returns(home: Path, echo: Echo) -> None:
    async with reconciling(home) as ctx:
        await until(lambda: says(ctx, "a word: HELLO. Say another."))
        (home / "echo" / "table.json").unlink()
        await until((home / "echo" / "table.json").exists)


async def test_what_stays_is_not_started(home: Path, echo: Echo) -> None:
    echo.upkeep = "stays"
    ctx = open_context(home)
    table.keep_services(ctx)
    assert not list(attempts_under(home / "echo")) and not await stop(ctx, echo.row)


async def test_an_unreadable_row_loses_no_followed_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    ctx = open_context(home)
    followed = {"a": (0, FollowedRun("a", "/runs/a", [], is_over=False))}
    ctx.services.followed = dict(followed)
    monkeypatch.setattr(runs, "named", fail)
    with pytest.raises(StorageError):
        loggers._look(ctx)
    assert ctx.services.followed == followed
