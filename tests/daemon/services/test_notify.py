"""Notifications of a daemon: noted on disk, delivered by a process beside the runs, whoever dies when."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import AlarmLimits
from lorad.box.paths import Home
from lorad.daemon.process.processes import attempts_under, read_status
from lorad.daemon.services.table import keep_services
from lorad.notify.outbox import load
from lorad.notify.table import Failed, State
from lorad.protocol.tables import STATE, write
from lorad.states import EndReason, Move
from lorad.store import events, runs
from tests.kit.daemon_world import (
    behave,
    finished,
    open_context,
    pid_of,
    reconciling,
    submit,
    until,
    until_state,
)

Json = dict[str, Any]


def to(path: Path, *on: str) -> list[Json]:
    """A command that appends what it gets to a file, as soon as the file's directory exists."""
    return [{"command": ["sh", "-c", f"cat >> {path}"], "events": on or ("start", "end", "failure")}]


def got(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pid_of_notifier(home: Path) -> int:
    lives = list(attempts_under(Home(home).notify))
    return int(((read_status(lives[-1]) if lives else None) or {}).get("pid") or 0)


def pending(home: Path) -> list[str]:
    return [one.delivery.key for one in load(Home(home).notify / "outbox.json").pending]


async def test_start_and_end_are_delivered_once(home: Path, tmp_path: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a", notify=to(tmp_path / "got"))
        await until_state(ctx, "a", "ended")
        await until(lambda: len(got(tmp_path / "got")) == 2 and not pending(home))
    start, end = sorted(got(tmp_path / "got"), key=lambda message: float(message["at"]))
    assert (start["event"], end["event"], end["reason"], end["step"]) == ("start", "end", "completed", 6)
    assert (Home(home).notify / "outbox.json").stat().st_mode & 0o777 == 0o600


async def test_run_that_notifies_nobody_starts_nothing(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "ended")
    assert not Home(home).notify.exists()


async def test_killed_processes_lose_no_notification(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "there" / "got"
    async with reconciling(home) as ctx:
        finished(ctx, "a", notify=to(path))
        ctx.loop.poke()
        await until(lambda: pending(home) and pid_of_notifier(home))
    (key,) = pending(home)
    os.kill(pid_of_notifier(home), signal.SIGKILL)
    path.parent.mkdir()
    async with reconciling(home):
        await until(lambda: not pending(home))
    assert {f"0.{message['id']}" for message in got(path)} == {key}


async def test_failing_receiver_is_trouble_until_mended(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "there" / "got"
    async with reconciling(home) as ctx:
        finished(ctx, "a", notify=to(path))
        ctx.loop.poke()
        said = "notify sh of the end of run a: it ended with code"
        await until(lambda: any(line.startswith(said) for line in ctx.loop.troubles.lines()))
        path.parent.mkdir()
        await until(lambda: not ctx.loop.troubles.lines() and not pending(home))


def test_what_is_given_up_is_one_event(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.daemon.services.table.keep", lambda *_, **__: None)
    ctx = open_context(home)
    finished(ctx, "a", notify=to(tmp_path / "got"))
    keep_services(ctx)
    (key,) = pending(home)
    write(Home(home).notify / STATE, State(given_up=[Failed(key, "it answered 404"), Failed("9.b", "no")]))
    for _ in range(2):
        keep_services(ctx)
    (event,) = events.of_kind(ctx.store, "a", "notify")
    assert (event["event"], event["error"], pending(home)) == ("end", "sh: it answered 404", [])
    ctx.store.close()
    again = open_context(home)  # a new daemon
    keep_services(again)
    assert pending(home) == []
    again.store.close()


def test_run_made_while_clocks_were_ahead_notifies(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.daemon.services.table.keep", lambda *_, **__: None)
    ctx = open_context(home)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1e10)
        submit(ctx, "a", notify=to(tmp_path / "got"))
    runs.move(ctx.store, "a", Move.END, reason=EndReason.COMPLETED)
    keep_services(ctx)
    (key,) = pending(home)
    assert key.startswith("0.a-end-")
    ctx.store.close()


def test_clock_that_is_set_stalls_nobody(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.daemon.services.table.keep", lambda *_, **__: None)
    ctx = open_context(home, alarms=AlarmLimits(stall=60.0))
    submit(ctx, "a", notify=to(tmp_path / "got", "alarm"))
    for move in (Move.PLACE, Move.CONFIRM):
        runs.move(ctx.store, "a", move)
    keep_services(ctx)
    wall, steady = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: wall + 172800.0)
    keep_services(ctx)
    assert pending(home) == []
    monkeypatch.setattr(time, "time", lambda: wall)
    monkeypatch.setattr(time, "monotonic", lambda: steady + 3600.0)
    keep_services(ctx)
    assert ["stall" in key for key in pending(home)] == [True]
    ctx.store.close()


async def test_alarm_is_delivered_while_the_run_works(home: Path, tmp_path: Path) -> None:
    behave(home, driver={"seconds": 0.1})
    async with reconciling(home, alarms=AlarmLimits(stall=0.5)) as ctx:
        submit(ctx, "a", notify=to(tmp_path / "got", "alarm"), trainer={"steps": 600})
        await until_state(ctx, "a", "running")
        pid = pid_of(ctx, "a")
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: got(tmp_path / "got"))
        os.kill(pid, signal.SIGKILL)
        await until_state(ctx, "a", "ended")
    (message,) = got(tmp_path / "got")
    assert message["alarm"]["kind"] == "stall" and message["event"] == "alarm"
