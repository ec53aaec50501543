"""The keys at the bottom of every screen."""

from typing import ClassVar

import pytest
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import TabbedContent

from lorad.tui.run.screen import TABS, RunScreen
from lorad.tui.screens.help import Help
from lorad.tui.widgets.keybar import KeyBar
from tests.kit.tui_world import World, a_run, names, screen_text, until, using


class Host(App[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "count('a')", "First"),
        Binding("b,c", "count('b')", "Second"),
        Binding("d", "no", "Asleep"),
        Binding("e", "count('e')", "Hidden", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.pressed: list[str] = []
        self.bells = 0

    def compose(self) -> ComposeResult:
        yield KeyBar()

    def action_count(self, key: str) -> None:
        self.pressed.append(key)

    def action_no(self) -> None:
        raise AssertionError("it does not work here")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return None if action == "no" else True

    def bell(self) -> None:
        self.bells += 1


def shown(app: App[None]) -> str:
    return app.query_one(KeyBar).render().plain


async def test_each_visible_action_has_one_key() -> None:
    async with (app := Host()).run_test(size=(60, 5)) as user:
        await user.pause()
        assert shown(app).split("▏") == [f"{'a First b Second d Asleep':49}", "^p palette"]


async def test_a_click_presses_what_is_under_it() -> None:
    async with (app := Host()).run_test(size=(60, 5)) as user:
        await user.pause()
        for column in (0, 6, 7, 8, 15):
            await user.mouse_down(KeyBar, offset=(column, 0))
        await user.pause()
        assert app.pressed == ["a", "a", "b", "b"] and app.bells == 0


async def test_disabled_key_is_dim_and_rings() -> None:
    async with (app := Host()).run_test(size=(60, 5)) as user:
        await user.pause()
        await user.mouse_down(KeyBar, offset=(18, 0))
        assert app.bells == 1
        line = app.query_one(KeyBar).render()
        assert [line.plain[span.start : span.end] for span in line.spans if span.style == "dim"] == [
            "d Asleep"
        ]


@pytest.mark.parametrize(("width", "told"), [(27, "a First b Second"), (26, "a First"), (17, ""), (3, "")])
async def test_narrow_bar_drops_the_palette_last(width: int, told: str) -> None:
    async with (app := Host()).run_test(size=(width, 5)) as user:
        await user.pause()
        before, _, palette = shown(app).partition("▏")
        assert (before.strip(), palette) == (told, "^p palette" if width > 10 else "")


@pytest.mark.system
async def test_kill_back_help_and_quit_fit_80_columns() -> None:
    async with using(World(a_run("sorter", spec={})), (80, 24)) as user:
        await until(user, lambda: names(user) == ["sorter"])
        wanted = ["x Kill", "? Help", "q Quit", ": Commands"]
        assert [key for key in wanted if key not in screen_text(user).splitlines()[-1]] == []
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        for number, tab in enumerate(TABS, 1):
            await user.press(str(number))
            assert user.app.screen.query_one(TabbedContent).active == f"pane-{tab.TITLE}"
            await until(user, lambda: "esc Back" in screen_text(user).splitlines()[-1])
            assert [key for key in wanted if key not in screen_text(user).splitlines()[-1]] == []


async def test_click_on_a_real_screen_opens_help() -> None:
    async with using(World(a_run("sorter"))) as user:
        await until(user, lambda: names(user) == ["sorter"] and "? Help" in screen_text(user))
        column = screen_text(user).splitlines()[-1].index("? Help")
        await user.mouse_down(KeyBar, offset=(column + 3, 0))
        await until(user, lambda: isinstance(user.app.screen, Help))
