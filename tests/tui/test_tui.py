"""The full-screen interface: what a user sees and what the keys do; on prepared data, and once on the real
daemon.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from lorad.client.client import Client
from lorad.tui.actions.table import HELP
from lorad.tui.app import LoradApp
from lorad.tui.run.screen import RunScreen
from lorad.tui.screens.dialogs import Confirm
from lorad.tui.screens.help import Help
from lorad.tui.widgets.table import Rows
from tests.kit.tui_world import (
    HOSTILE,
    SHOWN,
    Prepared,
    World,
    a_run,
    a_step,
    line,
    names,
    screen_text,
    until,
    using,
)

SPEC = Path(__file__).parents[2] / "examples" / "demo.yaml"


async def test_rows_appear_and_change_in_place() -> None:
    world = World(a_run("first"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["first"] and line(user, "#status"))
        world.runs = [a_run("second", created_at=time.time()), a_run("first", step=4)]
        world.tell("second")
        world.tell("first", "step")
        await until(user, lambda: names(user) == ["second", "first"] and "4/10" in screen_text(user))


async def test_cursor_stays_with_its_run() -> None:
    world = World(a_run("mine"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["mine"])
        world.runs.insert(0, a_run("other"))
        world.tell("other")
        await until(user, lambda: names(user) == ["other", "mine"])
        await user.press("P")
        await until(user, lambda: world.asked == [("pause", "mine")])


async def test_unchanged_rows_are_not_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    world, drawn, line_of = World(a_run("calm"), a_run("busy")), list[str](), Rows.line

    def line_and_note(rows: Rows, row: int) -> Any:
        drawn.append(rows.on_page[row])
        return line_of(rows, row)

    monkeypatch.setattr(Rows, "line", line_and_note)
    async with using(world) as user:
        await until(user, lambda: "busy" in screen_text(user))
        await user.pause()
        drawn.clear()
        world.runs[1]["reward"] = 0.75
        world.tell("busy", "step")
        await until(user, lambda: "0.750" in screen_text(user))
        assert set(drawn) == {"busy"}


async def test_stop_asks_and_the_default_is_no() -> None:
    world = World(a_run("precious"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["precious"])
        await user.press("s")
        await until(user, lambda: isinstance(user.app.screen, Confirm))
        assert "Stop precious?" in screen_text(user) and "writes a checkpoint" in screen_text(user)
        await user.press("enter")
        await until(user, lambda: not isinstance(user.app.screen, Confirm))
        assert world.asked == []
        await user.press("s", "y")
        await until(user, lambda: world.asked == [("stop", "precious")])
        await until(user, lambda: "lorad stop precious" in line(user, "#status"))


async def test_what_the_daemon_will_refuse_is_not_asked() -> None:
    world = World(a_run("over", state="ended", reason="completed"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["over"])
        await user.press("x")
        await until(user, lambda: world.asked == [("kill", "over")])


async def test_y_copies_the_shown_command() -> None:
    async with using(World(a_run("it's mine"))) as user:
        await until(user, lambda: len(names(user)) == 1)
        await user.press("y")
        await until(user, lambda: user.app.clipboard == """lorad show 'it'"'"'s mine'""")
        assert user.app.clipboard in line(user, "#status")


async def test_screen_stays_readable_without_a_daemon() -> None:
    world = World(a_run("steady"))
    async with using(world) as user:
        await until(user, lambda: names(user) == ["steady"])
        world.live(False)
        await until(user, lambda: "No daemon since" in screen_text(user))
        assert "steady" in screen_text(user)
        world.runs = [a_run("steady", step=9)]
        world.live(True)
        await until(user, lambda: "No daemon" not in screen_text(user) and "9/10" in screen_text(user))


async def test_text_of_others_is_shown_literally() -> None:
    world = World(a_run("odd", owner="\x1b[2J", state="queued", waiting=HOSTILE))
    async with using(world, (160, 40)) as user:
        await until(user, lambda: SHOWN in screen_text(user) and r"\x1b[2J" in screen_text(user))
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen) and SHOWN in screen_text(user))
        assert "\x1b" not in screen_text(user)


async def test_an_empty_home_says_how_to_begin() -> None:
    async with using(World()) as user:
        await until(user, lambda: "lorad init" in screen_text(user))


@pytest.mark.system
@pytest.mark.parametrize("size", [pytest.param((40, 10), marks=pytest.mark.long), (12, 3)])
async def test_every_screen_fits_any_terminal(size: tuple[int, int]) -> None:
    world = World(a_run("sorter"), a_run("waiter", state="queued", waiting="waits for a device " * 9))
    world.steps = [a_step(n, n / 10) for n in range(1, 4)]
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 2)
        await user.resize_terminal(*size)
        assert size[0] < 40 or "sorter" in screen_text(user)
        await user.press("question_mark", "escape", "x", "escape", "j", "enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen) and "waiter" in line(user, "#title"))
        await user.resize_terminal(120, 40)
        await until(user, lambda: "waits for a device" in screen_text(user))


@pytest.mark.system
async def test_help_lists_every_key() -> None:
    async with using(World(), (120, 300)) as user:
        await user.press("question_mark", "slash", "full_stop")  # all of them, since each id has one
        ids = [row.id for rows in HELP.values() for row in rows]

        def all_are_shown() -> bool:
            text = screen_text(user)  # drawn once for all of them
            return all(id in text for id in ids)

        await until(user, all_are_shown)


class Stuck(Prepared):
    """Its daemon takes a connection and then says nothing until the world ends."""

    def get(self, path: str) -> dict[str, Any]:
        with self.world.news:
            self.world.news.wait_for(lambda: not self.world.alive)
        return super().get(path)


async def test_keys_answer_while_the_daemon_hangs() -> None:
    world = World(a_run("slow"))
    async with LoradApp(Client(transport=Stuck(world))).run_test(size=(80, 24)) as user:
        await user.press("question_mark")
        await until(user, lambda: isinstance(user.app.screen, Help))
        world.live(False)
