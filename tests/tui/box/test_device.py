"""The screen of a device: its last hour, as far as it is measured, and whose its processes are."""

import time
from typing import Any

import pytest

from lorad.records.devices import Device
from lorad.tui.dashboard.tables import DevicesPane
from lorad.tui.details.device import hour
from lorad.tui.widgets.table import Rows
from tests.kit.tui_world import DEVICE, GIB, User, busy_world, detail, screen_text, shaped, until, using

LARGE = (160, 50)
OURS = {"pid": 7, "user": "ann", "name": "python", "memory": 30 * GIB, "ours": True}


def a_device(**more: Any) -> dict[str, Any]:
    processes = [*DEVICE["processes"], OURS]  # type: ignore[misc]
    return {**DEVICE, "processes": processes, "power": 350.5, "temperature": 61, **more}


async def opened(user: User) -> None:
    await until(user, lambda: user.app.screen.query_one(DevicesPane).key)
    user.app.screen.query_one(DevicesPane).focus()
    await user.press("enter")
    await until(user, lambda: detail(user) == "device" and "carol" in screen_text(user))


async def test_processes_are_marked_with_whose_they_are() -> None:
    world = busy_world()
    world.answers["devices"] = [a_device()]
    async with using(world, LARGE) as user:
        await opened(user)
        shown = screen_text(user)
        assert "93%" in shown and "71/80 GiB" in shown and "350 W" in shown and "61 °C" in shown
        rows = user.app.screen.query_one("#detail", Rows)
        assert rows.cells("40122")["whose"].plain == "not lorad's"
        assert rows.cells("7")["whose"].plain == "lorad, pool qwen-1: bold, calm"
        await user.press("j", "enter")
        await until(user, lambda: detail(user) == "pool")
        await user.press("escape", "escape")
        await until(user, lambda: user.app.screen is user.app.screen_stack[0])


@pytest.mark.parametrize(("ago", "column"), [(3600, 0), (1800, 30), (0, 59)])
def test_samples_stand_where_they_were_taken(ago: int, column: int) -> None:
    now = time.time()
    history = [{"at": now - ago, "memory": 80 * GIB, "utilization": 0.5}]
    drawn = hour(shaped(Device, {**DEVICE, "history": history}), 60, 1, now).plain.splitlines()
    assert drawn[1].rstrip() == " " * column + "▄" and drawn[3].rstrip() == " " * column + "█"


def test_what_is_not_measured_is_left_out() -> None:
    drawn = hour(shaped(Device, {**DEVICE, "utilization": None}), 60, 2, time.time()).plain
    assert "power" not in drawn and "temperature" not in drawn and "None" not in drawn


def test_an_hour_without_samples_says_so() -> None:
    drawn = hour(shaped(Device, DEVICE), 60, 4, time.time()).plain.splitlines()
    assert drawn[-1] == "Nothing of the last hour was measured." and "" not in drawn
