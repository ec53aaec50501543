"""What the dashboard knows and how little it asks for; and how it shows numbers and events."""

import time
from typing import Any

import pytest
from msgspec import Struct

from lorad.box.config import AlarmLimits
from lorad.client.client import Client
from lorad.records.runs import Event, Run
from lorad.states import EndReason
from lorad.tui.dashboard.run_rows import cells
from lorad.tui.dashboard.snapshot import HELD, Board
from lorad.tui.event_words import event_text
from lorad.tui.feed import Changes
from lorad.tui.widgets.sparkline import sparkline
from tests.kit.tui_world import HOSTILE, SHOWN, Prepared, World, a_run, an_event, busy_world, shaped

Json = dict[str, Any]


class Counting(Prepared):
    """Remembers what was asked for."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.paths = list[str]()

    def ask(self, method: str, path: str, body: Struct | None = None) -> Json:
        if path != "/v1/status":
            self.paths.append(path.removeprefix("/v1/"))
        return super().ask(method, path, body)


def happened(*events: Json, tick: bool = False) -> Changes:
    changes = Changes(tick=tick)
    for event in events:
        changes.take(shaped(Event, event))
    return changes


def a_board(world: World) -> tuple[Board, Client, Counting]:
    """Make a board that has read everything once."""
    transport, board = Counting(world), Board(AlarmLimits())
    client = Client(transport=transport)
    assert board.read(client, Changes(everything=True, tick=True)) is not None
    transport.paths.clear()
    return board, client, transport


def test_only_runs_that_something_happened_to_are_read() -> None:
    world = busy_world()
    board, client, transport = a_board(world)
    world.runs[0] = {**world.runs[0], "step": 4}
    news = board.read(client, happened(an_event(9, "bold", "step")))
    assert transport.paths == ["runs?names=bold"] and news is not None and news.runs[0].step == 4
    assert news.runs[1] is board.read(client, Changes(everything=True)).runs[1]  # type: ignore[union-attr]
    assert board.read(client, happened(an_event(10, "calm", "step"))) is None


def test_alarm_is_held_briefly_while_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    world = World(a_run("sorter", signals={"at": time.time(), "truncated": 1.0}))
    board, client, _ = a_board(world)

    def kinds(**more: Any) -> list[str]:
        world.runs = [a_run("sorter", created_at=world.runs[0]["created_at"], **more)]
        news = board.read(client, Changes(everything=True))
        return [alarm.kind for alarm in news.alarms] if news else []

    well = {"at": time.time(), "truncated": 0.0}
    assert kinds(signals=well) == ["truncation"]
    now += HELD + 1
    assert kinds(signals=well) == []
    assert kinds(signals={**well, "truncated": 1.0}) == ["truncation"]
    assert kinds(signals=well, state="ended", reason="completed") == []


def test_where_many_runs_changed_all_are_listed() -> None:
    board, client, transport = a_board(busy_world())
    board.read(client, happened(*(an_event(number, f"run-{number}") for number in range(10, 111))))
    assert [path.partition("?")[2][:4] for path in transport.paths] == ["all="]


def test_tick_refreshes_pools_devices_and_waiting() -> None:
    world = busy_world()
    board, client, transport = a_board(world)
    world.runs[2] = {**world.runs[2], "waiting": "2 runs are before it"}
    news = board.read(client, happened(tick=True))
    assert transport.paths == ["runs?names=waits", "pools", "devices"]
    assert news is not None and news.runs[2].waiting == "2 runs are before it"


def test_new_runs_come_first_and_removed_go() -> None:
    world = busy_world()
    board, client, _ = a_board(world)
    world.runs = [a_run("new", created_at=time.time() + 1), *world.runs[1:]]
    news = board.read(client, happened(an_event(9, "new", "state"), an_event(10, "bold", "removed")))
    assert news is not None and [run.name for run in news.runs] == ["new", "calm", "waits"]


def test_runs_that_ended_come_after_live_ones() -> None:
    over = a_run("over", state="ended", reason="completed", ended_at=time.time())
    world = World(over, a_run("old", created_at=900.0), a_run("oldest", created_at=800.0))
    board, client, _ = a_board(world)
    world.runs[2] = {**world.runs[2], "step": 5}
    news = board.read(client, happened(an_event(9, "oldest", "state")))
    assert news is not None and [run.name for run in news.runs] == ["old", "oldest", "over"]
    world.runs[1] = {**world.runs[1], "state": "ended", "reason": "stopped", "ended_at": time.time()}
    news = board.read(client, happened(an_event(10, "old", "state")))
    assert news is not None and [run.name for run in news.runs] == ["oldest", "over", "old"]


def test_an_imported_adapter_does_not_look_failed() -> None:
    looks = [cells(shaped(Run, a_run("a", state="ended", reason=reason)))["state"] for reason in EndReason]
    assert [text.plain for text in looks if text.plain.startswith("✖")] == [
        "✖ killed",
        "✖ failed",
        "✖ lost",
        "✖ attestation failed",
    ]


def test_event_of_an_old_run_keeps_it_hidden() -> None:
    world = busy_world()
    board, client, _ = a_board(world)
    world.runs.append(a_run("old", state="ended", reason="completed", ended_at=1000.0))
    assert board.read(client, happened(an_event(9, "old", "version"))) is None
    board.all = True
    news = board.read(client, happened(an_event(10, "old", "version")))
    assert news is not None and "old" in {run.name for run in news.runs}


def test_ages_are_refreshed_each_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(a_run("steady"))
    board, client, _ = a_board(world)
    assert board.read(client, happened()) is None
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    assert board.read(client, happened(tick=True)) is not None


def test_ticker_leaves_out_steps() -> None:
    board, client, _ = a_board(busy_world())
    news = board.read(
        client, happened(an_event(3, "bold", "step"), an_event(4, "bold", "checkpoint", step=4))
    )
    assert news is not None and [event.id for event in news.events] == [4, 2, 1]


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([0, 0.5, 1], 8, "▁▅█"),
        ([0.3] * 3, 8, "▅▅▅"),
        ([0.0] * 3, 8, "▁▁▁"),
        ([None, float("nan"), 2, 1], 8, "··█▁"),
        ([1, 2, 3, 4], 2, "▁█"),
        ([-1e308, 1e308], 8, "▁█"),
        ([float("inf"), 1], 8, "·▅"),
        ([], 8, ""),
        (None, 8, ""),
    ],
)
def test_sparkline_spans_least_to_largest_value(values: Any, width: int, bars: str) -> None:
    assert sparkline(values, width) == bars


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        (
            "state",
            {"state": "ended", "reason": "failed", "detail": "out of memory", "by": "daemon"},
            "failed: out of",
        ),
        ("state", {"state": "paused", "reason": None, "by": "ann"}, "paused (by ann)"),
        ("alias", {"alias": "prod", "version": None, "previous": "a@1"}, "alias prod is removed, before a@1"),
        ("checkpoint", {"step": 4, "bytes": 2048}, "checkpoint of step 4, 2.0 KiB"),
        ("eval", {"score": None}, "eval"),
        ("brand-new", {"x": 1, "y": ""}, "brand-new x=1"),
        ("warning", {"message": HOSTILE}, f"warning: {SHOWN}"),
    ],
)
def test_every_event_has_words_whatever_it_holds(kind: str, data: Json, words: str) -> None:
    assert event_text(shaped(Event, an_event(1, "a", kind, **data))).startswith(words)


def test_a_run_with_hardly_anything_has_cells() -> None:
    assert cells(Run("bare", "queued"))["state"].plain == "◌ queued"
