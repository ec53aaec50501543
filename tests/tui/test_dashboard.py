"""The dashboard: runs, pools, devices, events and alarms, at every size, with whatever runs are called and
say.
"""

import time
from typing import Any

import pytest
from rich.text import Text

from lorad.records.runs import Run
from lorad.tui.dashboard import run_rows
from lorad.tui.dashboard.run_rows import cells
from lorad.tui.dashboard.tables import Alarms, DevicesPane, PoolsPane, Ticker
from lorad.tui.run.screen import RunScreen
from tests.kit.tui_world import (
    DEVICE,
    HOSTILE,
    SHOWN,
    World,
    a_run,
    an_event,
    busy_world,
    line,
    names,
    screen_text,
    table,
    until,
    using,
)

Json = dict[str, Any]
SMALL, LARGE = (80, 24), (160, 50)


async def test_a_small_terminal_has_a_line_for_everything() -> None:
    async with using(busy_world(), SMALL) as user:
        await until(user, lambda: "qwen-1" in screen_text(user) and len(names(user)) == 3)
        assert line(user, "#title").startswith("lorad  2 running, 1 queued · 2,000 tok/s")
        alarmed = "1 alarm  !! bold KL 0.9 nats per token to the reference policy"
        assert line(user, "#alarmed").startswith(alarmed)
        assert "Qwen3-8B, 2 runs, 6/8 slots, 4,211/9,050 tok/s, train" in line(user, "#pools-lines")
        assert "71/80 GiB, 93% busy, qwen-1 (ann" in line(user, "#devices-lines")
        assert line(user, "#events-lines").endswith("bold eval 0.500 of @3")
        shown = screen_text(user)
        assert "● running !!" in shown and "3/10" in shown and "▁·█" in shown and "1000" in shown


async def test_a_large_terminal_has_panes_side_by_side() -> None:
    async with using(busy_world(), LARGE) as user:
        await until(user, lambda: "carol 38.0" in screen_text(user) and "eval 0.500" in screen_text(user))
        lines = screen_text(user).splitlines()
        assert any(
            "Qwen3-8B" in row and "4,211" in row and "cuda:0" in row and "carol 38.0" in row for row in lines
        )
        assert any("1 alarm " in row and "events" in row for row in lines)
        assert any("bold" in row and "KL 0.9" in row and "eval 0.500" in row for row in lines)


@pytest.mark.parametrize("pane", [Alarms, Ticker])
async def test_enter_on_alarm_or_event_opens_run(pane: type[Alarms] | type[Ticker]) -> None:
    async with using(busy_world(), LARGE) as user:
        await until(user, lambda: user.app.screen.query_one(pane).key)
        user.app.screen.query_one(pane).focus()
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen) and "bold" in line(user, "#title"))


async def test_keys_act_on_the_focused_panes_run() -> None:
    world = busy_world()
    async with using(world, LARGE) as user:
        await until(user, lambda: user.app.screen.query_one(Alarms).key)
        table(user).go("calm")
        user.app.screen.query_one(PoolsPane).focus()
        await user.press("P")
        user.app.screen.query_one(Alarms).focus()
        await user.press("P")
        await until(user, lambda: world.asked)
        assert world.asked == [("pause", "bold")]


async def test_a_key_ends_the_pool_under_the_cursor() -> None:
    world = busy_world()
    world.answers["POST pools/qwen-1?force=0"] = {"pool": "qwen-1", "state": "stopping"}
    async with using(world, LARGE) as user:
        await until(user, lambda: user.app.screen.query_one(PoolsPane).key)
        user.app.screen.query_one(PoolsPane).focus()
        await user.press("E")
        await until(user, lambda: "is loaded again when" in screen_text(user))
        await user.press("y")
        await until(user, lambda: "$ lorad pools stop qwen-1   qwen-1 is stopping." in line(user, "#status"))


async def test_tab_visits_panes_and_escape_returns() -> None:
    async with using(busy_world(), LARGE) as user:
        await until(user, lambda: table(user).has_focus and user.app.screen.query_one(Ticker).key)
        seen = []
        for _ in range(4):
            await user.press("tab")
            seen.append(type(user.app.screen.focused))
        assert seen == [PoolsPane, DevicesPane, Alarms, Ticker]
        await user.press("escape")
        assert table(user).has_focus


async def test_key_goes_to_the_next_alarmed_run() -> None:
    world = busy_world()
    world.runs.append(
        a_run("dead", state="ended", reason="failed", detail="out of memory", ended_at=time.time())
    )
    async with using(world, SMALL) as user:
        await until(user, lambda: len(names(user)) == 4 and "KL" in line(user, "#why"))
        await user.press("exclamation_mark")
        await until(user, lambda: line(user, "#why") == "dead: out of memory")
        await user.press("exclamation_mark")
        await until(user, lambda: line(user, "#why").startswith("bold: KL 0.9"))


async def test_acknowledged_alarms_of_ended_runs_stay_away() -> None:
    failed = a_run("dead", state="ended", reason="failed", detail="out of memory", ended_at=time.time())
    world = World(a_run("bold", signals={"at": time.time(), "kl": 0.9}), failed)
    async with using(world, SMALL) as user:
        await until(user, lambda: line(user, "#alarmed").startswith("2 alarms"))
        await user.press("z")
        assert line(user, "#alarmed").startswith("2 alarms")  # the one under the cursor still runs
        await user.press("G", "z")
        await until(user, lambda: line(user, "#alarmed").startswith("1 alarm  !! bold"))
    async with using(world := World(failed), SMALL) as user:
        await until(user, lambda: names(user) == ["dead"])
        assert line(user, "#alarmed") == ""
        world.runs[0] = {**failed, "ended_at": time.time() + 1}  # it was resumed, and failed again
        world.tell("dead")
        await until(user, lambda: line(user, "#alarmed").startswith("1 alarm"))


async def test_an_acknowledgement_that_cannot_be_kept_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    world = World(a_run("dead", state="ended", reason="failed", ended_at=time.time()))
    async with using(world, SMALL) as user:
        await until(user, lambda: line(user, "#alarmed") and names(user))
        await user.press("z")
        await until(user, lambda: not line(user, "#alarmed"))
        assert "until this session ends: /proc/none/lorad/acknowledged.json: No such file" in line(
            user, "#status"
        )


async def test_the_filter_narrows_as_it_is_typed() -> None:
    async with using(busy_world()) as user:
        await until(user, lambda: len(names(user)) == 3)
        await user.press("slash", *"base:qwen alarm:k")
        await until(user, lambda: names(user) == ["bold"] and "1 of 3 shown" in line(user, "#title"))
        await user.press(*"xyz")
        await until(user, lambda: "No run has all of: base:qwen alarm:kxyz" in screen_text(user))
        await user.press("enter", "escape")
        await until(user, lambda: len(names(user)) == 3 and table(user).has_focus)


async def test_old_runs_are_asked_for_with_a() -> None:
    world = World(a_run("new"))
    world.answers["runs"] = lambda query: [
        a_run("new"),
        *[a_run("old", state="ended", reason="stopped")] * int(query["all"]),
    ]
    async with using(world) as user:
        await until(user, lambda: names(user) == ["new"])
        await user.press("a")
        await until(user, lambda: names(user) == ["new", "old"] and "old runs too" in line(user, "#title"))


@pytest.mark.parametrize("size", [SMALL, LARGE, (40, 10)])
async def test_odd_names_numbers_and_texts_are_shown_sanely(size: tuple[int, int]) -> None:
    nan = float("nan")
    broken = a_run("n" * 200, reward=nan, recent=[nan, 0.1, None], step=999_999, steps=2_000_000)
    waits = a_run("übersetzer-翻訳者-🦉", state="queued", waiting=HOSTILE * 20)
    world = World(a_run(HOSTILE, owner=HOSTILE), broken, waits)
    world.answers |= {"events": [an_event(1, HOSTILE, "warning", message=HOSTILE)], "devices": [DEVICE]}
    world.answers["status"] = {"caller": {"user": "ann", "admin": False}}
    async with using(world, size) as user:
        await until(user, lambda: len(names(user)) == 3 and "belongs to" in line(user, "#why"))
        assert "nnn" in screen_text(user) and "翻" in screen_text(user)
        assert all(text.isprintable() for text in (line(user, "#why"), *screen_text(user).splitlines()))
        if size != (40, 10):
            await until(user, lambda: "999999/2M" in screen_text(user) and SHOWN[:16] in screen_text(user))


@pytest.mark.parametrize(("count", "pages"), [(450, 3), (5000, 25)])
async def test_thousands_of_runs_page(count: int, pages: int) -> None:
    ended = {"state": "ended", "reason": "completed", "created_at": 900.0, "ended_at": time.time()}
    world = World(*(a_run(f"run-{number:04}", **ended) for number in range(count)))
    async with using(world, SMALL) as user:
        await until(user, lambda: f"{count:,} ended · page 1/{pages}" in line(user, "#title") and names(user))
        assert len(names(user)) == 200
        await user.press("G")
        await until(
            user,
            lambda: names(user)[-1] == f"run-{count - 1:04}" and f"page {pages}/" in line(user, "#title"),
        )
        assert len(user.app.screen._maker._last_made) <= 400  # type: ignore[attr-defined]


async def test_cells_are_made_only_for_changed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    def counted(run: Run, **more: Any) -> dict[str, Text]:
        made.append(run.name)
        return cells(run, **more)

    monkeypatch.setattr(run_rows, "cells", counted)
    world = World(*(a_run(f"run-{number:03}", created_at=900.0) for number in range(300)))
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 200)
        assert len(made) == 200
        world.runs[7] = {**world.runs[7], "step": 8}
        world.tell("run-007", "step")
        await until(user, lambda: "8/10" in screen_text(user))
        assert made[200:] == ["run-007"]


async def test_resizing_there_and_back_changes_nothing() -> None:
    async with using(busy_world(), LARGE) as user:
        await until(user, lambda: "eval 0.500" in screen_text(user))
        for size in ((40, 10), (12, 3), SMALL, LARGE):
            await user.resize_terminal(*size)
            await user.pause()
            assert size[0] < 40 or "bold" in screen_text(user)
        await until(user, lambda: "eval 0.500" in screen_text(user))
