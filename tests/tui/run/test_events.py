"""The events tab lists what happened to a run."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lorad.client.client import Client
from lorad.records.runs import Event, RunDetails
from lorad.tui.feed import EVENTS, Changes
from lorad.tui.run.events import EventsTab, News, what
from lorad.tui.run.screen import RunScreen
from lorad.tui.widgets.table import Rows
from tests.kit.tui_world import (
    HOSTILE,
    SHOWN,
    Prepared,
    User,
    World,
    a_run,
    screen_text,
    shaped,
    until,
    using,
)

Json = dict[str, Any]
METRICS = {"reward": 0.53, "loss": 0.0123, "kl": 0.5, "tokens_per_second": 1234.0, "seconds": 1.5}


def an_event(id: int, kind: str, **data: Any) -> Json:
    return {"id": id, "at": time.time() - 100 + id, "run": "sorter", "kind": kind, "data": data}


PAST = [
    an_event(1, "attempt", attempt=1, resumed_from=None),
    an_event(2, "state", state="running", by="ann"),
    *(an_event(number, "step", step=number - 2, metrics=METRICS) for number in range(3, 9)),
    an_event(9, "warning", message=f"odd {HOSTILE}"),
]

EVENTS_BEFORE = [shaped(Event, event) for event in PAST]
RUN = shaped(RunDetails, a_run("sorter"))


class History(World):
    """What happened so far, and what happens."""

    def __init__(self, past: list[Json]) -> None:
        super().__init__(a_run("sorter"), a_run("other"))
        self.told = [dict(event) for event in past]
        self.answers["events"] = lambda query: [
            event for event in self.told if event["run"] == query.get("run")
        ]

    def happen(self, kind: str, *, run: str = "sorter", **data: Any) -> None:
        with self.news:
            self.told.append(an_event(len(self.told) + 1, kind, **data) | {"run": run})
            self.news.notify_all()


@asynccontextmanager
async def looking_at(
    past: list[Json], size: tuple[int, int] = (110, 30)
) -> AsyncIterator[tuple[User, History]]:
    """The tab of the events of a run, in front."""
    world = History(past)
    async with using(world, size) as user:
        await until(user, lambda: "sorter" in screen_text(user))
        user.app.open_run("sorter")  # type: ignore[attr-defined]
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await user.press("7")
        await until(user, lambda: f"{len(past)} events" in screen_text(user))
        yield user, world


def shown(user: User) -> list[str]:
    table = user.app.screen.query_one(EventsTab).query_one(Rows)
    return [table.cells(key)["what"].plain for key in table.on_page]


async def test_events_are_in_words_newest_first() -> None:
    async with looking_at(PAST) as (user, _):
        await until(user, lambda: len(shown(user)) == 9)
        assert shown(user)[1] == "step 6, reward 0.530, loss 0.0123, KL 0.5000, 1234 tok/s, 1.50 s"
        assert shown(user)[-2:] == ["running (by ann)", "attempt 1 begins"]
        assert SHOWN in screen_text(user) and "\x1b" not in screen_text(user)


async def test_new_events_are_added_to_their_run() -> None:
    async with looking_at(PAST) as (user, world):
        await until(user, lambda: len(shown(user)) == 9)
        world.happen("eval", run="other", score=0.25, version=1)
        world.happen("eval", score=0.75, version=6)
        await until(user, lambda: shown(user)[0] == "eval 0.750 of @6")
        assert len(shown(user)) == 10


def test_events_that_came_in_are_not_asked_for() -> None:
    world, tab = History(PAST), EventsTab("sorter")
    client, changes = Client(transport=Prepared(world)), Changes()
    assert tab.read(client, Changes(everything=True), RUN) == News(EVENTS_BEFORE, is_all=True)
    world.answers.clear()
    for event in (
        PAST[-1],
        an_event(10, "eval", score=0.5, version=1),
        an_event(11, "eval") | {"run": "other"},
    ):
        changes.take(shaped(Event, event))
    news = tab.read(client, changes, RUN)
    assert news is not None and [event.id for event in news.events] == [10] and not news.is_all
    assert tab.read(client, Changes(tick=True), RUN) is None


def test_too_many_new_events_are_fetched_anew() -> None:
    world, tab, changes = History(PAST), EventsTab("sorter"), Changes()
    for number in range(EVENTS + 1):
        changes.take(shaped(Event, an_event(number, "step") | {"run": "other"}))
    assert tab.read(Client(transport=Prepared(world)), changes, RUN) == News(EVENTS_BEFORE, is_all=True)


@pytest.mark.system
async def test_kinds_and_words_narrow_until_escape() -> None:
    async with looking_at(PAST) as (user, _):
        await user.press("v", "v")
        await until(user, lambda: shown(user) == ["running (by ann)"])
        await user.press("escape")
        await until(user, lambda: len(shown(user)) == 9)
        await user.press("slash", *"step !6")
        await until(user, lambda: len(shown(user)) == 5)
        await user.press("enter", "escape")
        await until(user, lambda: len(shown(user)) == 9)
        await user.press("escape")
        await until(user, lambda: not isinstance(user.app.screen, RunScreen))


@pytest.mark.system
async def test_selected_event_is_shown_whole_below() -> None:
    long = an_event(1, "warning", message="x" * 120 + " the end")
    async with looking_at([long], (80, 24)) as (user, _):
        await until(user, lambda: "the end" in screen_text(user))


@pytest.mark.system
async def test_cursor_stays_on_event_or_newest() -> None:
    async with looking_at(PAST) as (user, world):
        table = user.app.screen.query_one(EventsTab).query_one(Rows)
        await until(user, lambda: table.key == "9")
        world.happen("eval", score=0.75, version=6)
        await until(user, lambda: table.key == "10")
        await user.press("j")
        world.happen("eval", score=0.5, version=6)
        await until(user, lambda: len(shown(user)) == 11)
        assert table.key == "9"


@pytest.mark.system
@pytest.mark.parametrize("size", [pytest.param((40, 10), marks=pytest.mark.long), (12, 3)])
async def test_any_size_does(size: tuple[int, int]) -> None:
    async with looking_at(PAST) as (user, _):
        await user.resize_terminal(*size)
        await user.press("G", "v", "slash", "a", "escape")
        await user.resize_terminal(110, 30)
        await until(user, lambda: len(shown(user)) == 9)


@pytest.mark.parametrize(
    "data", [{}, {"metrics": None, "step": 3}, {"metrics": {"reward": float("nan")}, "step": 1}]
)
def test_odd_step_data_is_shown_anyway(data: Json) -> None:
    assert what(Event(1, 0.0, "a", "step", data)).startswith("step")
