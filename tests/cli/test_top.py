"""`lorad top`: what the dashboard shows, in plain tables, for scripts, and again and again."""

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.box.config import Config, config_of
from lorad.box.paths import Home
from lorad.cli.commands import dashboard, show
from lorad.client.client import Client
from lorad.errors import SpecError
from lorad.records.devices import Device
from lorad.records.pools import Pool
from tests.kit.tui_world import Prepared, World, a_run, shaped

POOL = {
    "pool": "tiny-1",
    "state": "ready",
    "model": "/models/qwen",
    "tenants": ["sorter"],
    "loaded": [],
    "runs": [{"run": "sorter", "phase": "sample"}],
    "capacity": {"versions": 2, "max_versions": 8, "max_rank": 8},
    "engine_tokens_per_second": 900.0,
    "trainer_tokens_per_second": 400.0,
    "memory_bytes": 1 << 30,
    "idle_seconds": 0,
}
DEVICE = {
    "device": "gpu:0",
    "name": "H100",
    "memory_total": 80 << 30,
    "memory_used": 79 << 30,
    "utilization": 0.9,
    "pool": "tiny-1",
    "lease": None,
    "processes": [{"pid": 7, "user": "bob", "name": "x\x1b[31m", "memory": 9 << 30, "ours": False}],
}


def on_a_terminal(patch: pytest.MonkeyPatch, width: int, height: int) -> None:
    """Make the captured output look like a terminal."""
    patch.setattr(sys.stdout, "isatty", lambda: True)
    patch.setenv("COLUMNS", str(width))
    patch.setenv("LINES", str(height))
    patch.setenv("NO_COLOR", "1")


Shown = Callable[..., list[str]]


def a_world(*runs: dict[str, Any]) -> World:
    made = World(*runs)
    made.answers = {"pools": [POOL], "devices": [DEVICE]}
    made.answers["status"] = {"troubles": [], "runs": {"running": 1, "ended": 7}, "disk": {"free": 9 << 40}}
    return made


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> Shown:
    """The lines that `lorad top` prints of a world, on a terminal of this size."""

    def lines(world: World, width: int = 200, height: int = 0, **options: bool) -> list[str]:
        monkeypatch.setattr(dashboard, "Client", lambda: Client(transport=Prepared(world)))
        on_a_terminal(monkeypatch, width, height or 1000)
        dashboard.top(**options)
        return capsys.readouterr().out.splitlines()

    return lines


def test_runs_pools_devices_and_alarms_are_shown(shown: Shown) -> None:
    sorter = a_run("sorter", signals={"at": time.time(), "kl": 3.0}, recent=[0.0, None, 1.0])
    text = "\n".join(shown(a_world(sorter)))
    assert all(
        word in text
        for word in ("sorter", "3/10", "qwen", "sample", "2/8", "gpu:0", "90%", "9.0 TiB free", "▁·█")
    )
    assert "!!  sorter  kl" in text and "!   gpu:0   memory" in text
    assert "x\\x1b[31m" in text


def test_what_works_comes_first_whatever_its_age(shown: Shown) -> None:
    over = a_run("over", state="ended", reason="completed")
    lines = shown(a_world(over, a_run("waiter", state="queued"), a_run("sorter")))
    places = [
        next(i for i, line in enumerate(lines) if line.startswith(name))
        for name in ("sorter", "waiter", "over")
    ]
    assert places == sorted(places)


def test_small_terminal_gets_fewer_columns_and_runs(shown: Shown) -> None:
    runs = [a_run("sorter"), *(a_run(f"over-{n}", state="ended", reason="completed") for n in range(40))]
    lines = shown(a_world(*runs), 40, 24)
    assert len(lines) <= 24 and "reward" in "\n".join(lines) and "owner" not in "\n".join(lines)
    assert len(shown(a_world(*runs), 200)) > 40


def test_columns_are_dropped_before_cells_are_cut(shown: Shown) -> None:
    long = a_run(
        "a-name-of-thirty-characters-long", owner="a-long-user-name", detail="no device is free " * 9
    )
    lines = shown(a_world(long), 90, 24)
    assert "a-name-of-thirty-characters-long" in lines[3] and "reward" in lines[2] and "owner" not in lines[2]
    assert all(len(line.rstrip()) <= 90 for line in lines)


def test_json_is_one_object_of_the_clients_rows(shown: Shown) -> None:
    found = json.loads("\n".join(shown(a_world(a_run("sorter", signals={"kl": 3.0})), as_json=True)))
    assert found.keys() == {"runs", "pools", "devices", "alarms", "at"}
    whole = [msgspec.to_builtins(row) for row in (shaped(Pool, POOL), shaped(Device, DEVICE))]
    assert (found["runs"][0]["name"], *found["pools"], *found["devices"]) == ("sorter", *whole)
    assert found["alarms"][0] == {
        "level": "bad",
        "kind": "kl",
        "on": "run",
        "subject": "sorter",
        "says": "KL 3 nats per token to the reference policy; `lorad why sorter` says more",
    }


def test_watching_prints_a_line_of_json_each_time(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([None, None])
    monkeypatch.setattr("time.sleep", lambda _: next(looks))
    with pytest.raises(StopIteration):
        shown(a_world(a_run("sorter")), watch=True, as_json=True)
    assert [json.loads(line)["runs"][0]["name"] for line in capsys.readouterr().out.splitlines()] == [
        "sorter"
    ] * 3


def test_limits_are_those_of_the_home(shown: Shown, home: Path) -> None:
    (home / "config.yaml").write_text("alarms: {kl: 5}")
    sorter = a_run("sorter", signals={"at": time.time(), "kl": 3.0})
    assert "sorter  kl" not in "\n".join(shown(a_world(sorter)))
    (home / "config.yaml").write_text("alarms: {kl: 0}")
    with pytest.raises(SpecError, match=r"alarms\.kl"):
        shown(a_world(sorter))


def test_unreadable_config_of_another_user_means_defaults(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "config.yaml").write_text("alarms: {kl: 5}")
    monkeypatch.setattr("os.access", lambda *_: False)
    assert config_of(Home(home)).alarms.kl == 5
    monkeypatch.setattr(Home, "shared_by", "root")
    assert config_of(Home(home)) == Config()


def test_show_includes_the_alarms_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    more = {"attempts": [], "processes": [], "directory": "/runs/sorter", "spec": {}}
    world = World(a_run("sorter", signals={"at": time.time(), "truncated": 1.0}, **more))
    monkeypatch.setattr(show, "Client", lambda: Client(transport=Prepared(world)))
    show.show("sorter")
    assert "alarm      100% of the completions are cut" in capsys.readouterr().out


@pytest.mark.system
def test_watch_redraws_on_a_terminal_until_interrupted(home: Path) -> None:
    subprocess.run([sys.executable, "-m", "lorad", "daemon", "start"], check=True, capture_output=True)
    pid, terminal = pty.fork()
    if pid == 0:
        # a shell's background job has it ignored, and so all it starts
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "lorad", "top", "--watch"])
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    seen = b""
    while seen.count(b"\x1b[H\x1b[2J") < 2:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)
    assert b"No runs" in seen and b"cpu" in seen


def test_the_tui_shows_it_until_its_screens_stand(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, 100, 24)
    with dashboard.glance(Client(transport=Prepared(a_world(a_run("sorter")))), Config()):
        seen = capsys.readouterr().out
    assert seen.startswith(dashboard.ENTER) and "sorter" in seen and seen.endswith(dashboard.DRAWN)
    assert capsys.readouterr().out == ""


def test_interrupted_start_of_the_tui_restores_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt), dashboard.glance(Client(transport=Prepared(a_world())), Config()):
        raise KeyboardInterrupt
    assert capsys.readouterr().out.endswith(dashboard.LEAVE)
