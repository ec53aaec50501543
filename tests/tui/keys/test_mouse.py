"""What Enter does works by clicks, the wheel scrolls, and the keys at the bottom are buttons."""

import pytest
from textual.events import MouseScrollDown
from textual.widgets import Button

from lorad.tui.palette.screen import CommandLine
from lorad.tui.run.screen import RunScreen
from lorad.tui.screens.dialogs import Confirm
from lorad.tui.screens.help import Help
from lorad.tui.serving.screen import Serving
from lorad.tui.widgets.keybar import KeyBar
from lorad.tui.widgets.table import Rows
from tests.kit.tui_world import User, World, a_run, line, names, screen_text, table, until, using


async def press_in_bar(user: User, text: str) -> None:
    column = screen_text(user).splitlines()[-1].index(text)
    await user.click(KeyBar, offset=(column + 1, 0))


async def test_second_click_on_a_run_opens_it() -> None:
    async with using(World(a_run("first"), a_run("second"))) as user:
        await until(user, lambda: len(names(user)) == 2)
        await user.click(Rows, offset=(4, 2))
        await until(user, lambda: table(user).key == "second")
        await user.click(Rows, offset=(4, 2))
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await until(user, lambda: line(user, "#title").startswith("second"))


async def test_click_on_a_tab_shows_it() -> None:
    async with using(World(a_run("first"))) as user:
        await until(user, lambda: names(user) == ["first"])
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await until(user, lambda: "5 logs" in screen_text(user))
        await user.click("#--content-tab-pane-logs")
        await until(user, lambda: "lorad logs first" in line(user, "#status"))


async def test_click_on_a_heading_orders_by_it() -> None:
    async with using(World(a_run("low", reward=0.1), a_run("high", reward=0.9))) as user:
        await until(user, lambda: names(user) == ["low", "high"])
        heading = table(user).heading()
        column = "".join(part.text for part in heading).index("reward")
        await user.click(Rows, offset=(column, 0))
        await user.click(Rows, offset=(column, 0))
        await until(user, lambda: names(user) == ["high", "low"])


async def test_wheel_scrolls_a_long_table() -> None:
    async with using(World(*(a_run(f"run-{n:02}") for n in range(60))), (80, 24)) as user:
        await until(user, lambda: len(names(user)) == 60)
        await user._post_mouse_events([MouseScrollDown], Rows, offset=(4, 4))
        await until(user, lambda: table(user).scroll_offset.y > 0)


@pytest.mark.parametrize(
    ("text", "screen"),
    [("x Kill", Confirm), ("? Help", Help), (": Commands", CommandLine), ("M Serving", Serving)],
)
async def test_bar_presses_what_is_clicked(text: str, screen: type) -> None:
    async with using(World(a_run("first"))) as user:
        await until(user, lambda: names(user) == ["first"] and text in screen_text(user))
        await press_in_bar(user, text)
        await until(user, lambda: isinstance(user.app.screen, screen))


@pytest.mark.system
async def test_clicks_answer_a_question() -> None:
    world = World(a_run("first"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["first"] and "x Kill" in screen_text(user))
        await press_in_bar(user, "x Kill")
        await until(user, lambda: isinstance(user.app.screen, Confirm) and user.app.screen.query(Button))
        await user.click("#yes")
        await until(user, lambda: world.asked == [("kill", "first")])
