"""The bill as a screen: by what, since when, its sum, and what enter opens."""

import time
from typing import Any

import pytest

from lorad.tui.run.screen import RunScreen
from tests.kit.tui_world import World, busy_world, detail, line, screen_text, until, using

Json = dict[str, Any]


def a_world(asked: list[Json]) -> World:
    def bill(query: Json) -> Json:
        asked.append(query)
        keys = {"run": ["bold", ""], "user": ["ann", "bob"]}.get(query["by"], [])
        lines = [
            {"key": key, "owner": "ann", "held": 3600.0 * (n + 1), "sampled": 1234, "cost": 0.004 + n}
            for n, key in enumerate(keys)
        ]
        total = {"held": 10800.0, "busy": 60.0, "cost": 1.008}
        return {"by": query["by"], "rows": lines, "total": total, "currency": "EUR"}

    world = busy_world()
    world.answers["bill"] = bill
    return world


async def test_the_bill_has_lines_and_sum() -> None:
    asked: list[Json] = []
    async with using(a_world(asked), (120, 36)) as user:
        await until(user, lambda: "bold" in screen_text(user))
        await user.press("B")
        await until(user, lambda: "1,234" in screen_text(user))
        shown = screen_text(user)
        assert detail(user) == "bill" and "ann" in shown and "<0.01 EUR" in shown
        assert line(user, "#below") == "total  3h00m held · 1m00s busy · 1.01 EUR cost"
        assert line(user, "#status") == "$ lorad bill --by user --since 7d"
        assert asked[0]["by"] == "user" and abs(float(asked[0]["since"]) - time.time() + 7 * 86400) < 600


@pytest.mark.system
async def test_keys_choose_by_what_and_since_when() -> None:
    asked: list[Json] = []
    async with using(a_world(asked), (120, 36)) as user:
        await until(user, lambda: "bold" in screen_text(user))
        await user.press("B", "b", "v", "v")
        await until(user, lambda: asked and asked[-1] == {"by": "run"} and "(nobody)" in screen_text(user))
        assert line(user, "#status") == "$ lorad bill --by run"
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await user.press("escape", "b")
        await until(user, lambda: "Nothing was used." in line(user, "#below"))
