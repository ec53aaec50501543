"""The screen of a pool: what it reports and nothing else, who waits, its logs, and how it is ended."""

from typing import Any

import pytest

from lorad.records.pools import Pool
from lorad.tui.dashboard.tables import PoolsPane
from lorad.tui.details.pool_figures import lines
from lorad.tui.run.screen import RunScreen
from lorad.tui.widgets.table import Rows
from tests.kit.tui_world import (
    GIB,
    HOSTILE,
    POOL,
    User,
    World,
    a_run,
    busy_world,
    detail,
    line,
    names,
    screen_text,
    shaped,
    until,
    using,
)

Json = dict[str, Any]
LARGE = (160, 50)
ENGINE = {
    "name": "sglang",
    "software": "0.5",
    "alive": True,
    "asleep": False,
    "running": 96,
    "waiting": 12,
    "slots_used": 6,
    "slots": 8,
    "prefix_hits": 0.71,
    "cache_used": 0.64,
}
TRAINER = {"name": "fsdp", "alive": True, "here": True, "memory": 38 * GIB, "memory_peak": 44 * GIB}


def a_world() -> World:
    world = busy_world()
    world.runs.append(a_run("later", state="queued", pool=None, base=POOL["model"], waiting="no free slot"))
    slots = [
        {"run": "bold", "phase": "train", "bytes": GIB, "waited": 75.0},
        {"run": "calm", "phase": "idle"},
    ]
    more = {"engine": ENGINE, "trainer": TRAINER, "runs": slots, "loaded": ["bold@3", "served@9"]}
    world.answers["pools"] = [POOL | more]
    world.answers["aliases"] = [{"alias": "prod", "run": "served", "version": 9}]
    world.answers["runs/bold/logs/names"] = ["driver", "pool", "engine-0"]
    world.log = "line one\nERROR line two\n"
    return world


async def opened(user: User) -> None:
    await until(user, lambda: user.app.screen.query_one(PoolsPane).key)
    user.app.screen.query_one(PoolsPane).focus()
    await user.press("enter")
    await until(user, lambda: detail(user) == "pool" and "line two" in screen_text(user))


async def test_enter_on_a_pool_shows_its_figures() -> None:
    async with using(a_world(), LARGE) as user:
        await opened(user)
        shown = screen_text(user)
        assert "sglang 0.5 · awake · queue: 96 decoding, 12 waiting · 6/8 versions" in shown
        assert "prompt cache: 71% hits · 64% full" in shown
        assert "trainer 38.0 GiB (peak 44.0 GiB)" in shown and "1 waiting for it" in shown
        rows = user.app.screen.query_one("#detail", Rows)
        assert list(rows.on_page) == ["bold", "calm", "served", "later"]
        told = {key: [text.plain.strip() for text in rows.cells(key).values()] for key in rows.on_page}
        assert told["bold"][1:6] == ["train", "1m15s", "@3", "", "1.0 GiB"]
        assert told["served"][1:5] == ["serves", "", "@9", "prod"]
        assert told["later"][1] == "waits" and told["later"][-1] == "no free slot"


def test_figures_that_are_not_reported_are_left_out() -> None:
    text = lines(shaped(Pool, {"pool": "p", "state": "starting", "engine": {"name": "vllm"}}), 0).plain
    assert "engine  vllm" in text and "memory" not in text
    assert not any(word in text for word in ("queue", "cache", "tok/s", "None", "UNSET"))


async def test_logs_are_chosen_and_searched() -> None:
    world = a_world()
    async with using(world, LARGE) as user:
        await opened(user)
        assert "[pool]" in screen_text(user) and "engine-0" in screen_text(user)
        await user.press("tab", "slash", *"two", "enter")
        await until(user, lambda: "1 of 2 lines" in screen_text(user))
        await user.press("escape", "o")
        await until(user, lambda: "[engine-0]" in screen_text(user))


async def test_enter_opens_a_run_and_escape_returns() -> None:
    async with using(a_world(), LARGE) as user:
        await opened(user)
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await user.press("escape")
        await until(user, lambda: detail(user) == "pool")
        await user.press("escape")
        await until(user, lambda: len(names(user)) == 4)


async def test_a_pool_is_ended_after_a_question() -> None:
    world = a_world()
    world.answers["POST pools/qwen-1?force=0"] = {"pool": "qwen-1", "state": "stopping"}
    async with using(world, LARGE) as user:
        await opened(user)
        await user.press("E")
        await until(user, lambda: "is loaded again when" in screen_text(user))
        await user.press("y")
        await until(user, lambda: "$ lorad pools stop qwen-1   qwen-1 is stopping." in line(user, "#status"))
        world.answers["pools"] = []
        await until(user, lambda: "is not up" in line(user, "#above"))


@pytest.mark.parametrize("size", [(80, 24), (40, 10), LARGE])
async def test_a_key_opens_the_runs_pool(size: tuple[int, int]) -> None:
    world = a_world()
    world.answers["pools"][0]["engine"] = ENGINE | {"detail": HOSTILE}
    async with using(world, size) as user:
        await until(user, lambda: names(user)[:1] == ["bold"])
        await user.press("l")
        await until(user, lambda: "qwen-1" in line(user, "#title") and "bold" in screen_text(user))
        assert all(text.isprintable() for text in screen_text(user).splitlines())
