"""The line behind `:`: what it completes, what it asks before, and what it says is wrong."""

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
from textual.events import Paste
from textual.widgets import Input, OptionList

from lorad.tui.palette.screen import CommandLine
from lorad.tui.palette.verbs import TABS, VERBS
from lorad.tui.run import screen as run_screen
from lorad.tui.run.screen import RunScreen
from lorad.tui.screens.dialogs import Confirm
from lorad.tui.widgets.line import Line
from tests.kit.tui_world import (
    DEVICE,
    POOL,
    User,
    World,
    a_run,
    detail,
    line,
    names,
    screen_text,
    until,
    using,
)

SWEEP = ("sweep-1", "sweep-2", "other")


def select(world: World) -> Callable[[Any], Any]:
    """Answer as the daemon does, as far as names and states go."""

    def answer(sent: Any) -> Any:
        meant = sent["selection"]
        globs, states = meant.get("names", ["*"]), meant.get("state")
        return {
            "items": [
                run
                for run in world.runs
                if any(fnmatch(run["name"], glob) for glob in globs)
                and (not states or run["state"] in states)
            ]
        }

    return answer


def a_world(*runs: str) -> World:
    world = World(*(a_run(name) for name in runs))
    world.answers |= {
        "POST select": select(world),
        "pools": [POOL],
        "versions": [{"run": runs[0], "version": 3, "step": 3, "pinned": True, "aliases": ["bot"]}],
    }
    return world


def shown(user: User) -> list[str]:
    listed = user.app.screen.query_one(OptionList)
    return [str(listed.get_option_at_index(at).prompt).split()[0] for at in range(listed.option_count)]


def typed(user: User) -> str:
    return user.app.screen.query_one(Input).value


def status(user: User) -> str:
    """The status line of the dashboard."""
    return user.app.screen_stack[0].query_one("#status", Line).said.plain


async def begin_line(user: User) -> None:
    await user.press("colon")
    await until(user, lambda: isinstance(user.app.screen, CommandLine) and user.app.screen.query(Input))


async def paste_line(user: User, text: str) -> None:
    await begin_line(user)
    user.app.screen.query_one(Input).post_message(Paste(text))
    await until(user, lambda: typed(user) == text)


async def type_line(user: User, text: str) -> None:
    await begin_line(user)
    await user.press(*("space" if letter == " " else letter for letter in text))


async def test_glob_stops_what_it_names_after_asking() -> None:
    world = a_world(*SWEEP)
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 3)
        await type_line(user, "stop sweep-*")
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, Confirm))
        assert "sweep-1" in screen_text(user) and "sweep-2" in screen_text(user)
        assert world.asked == []
        await user.press("y")
        await until(user, lambda: sorted(world.asked) == [("stop", "sweep-1"), ("stop", "sweep-2")])
        await until(user, lambda: "2 of 2 done" in status(user))


async def test_no_keeps_the_line_and_does_nothing() -> None:
    world = a_world(*SWEEP)
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 3)
        await type_line(user, "kill other")
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, Confirm))
        await user.press("n")
        await until(user, lambda: isinstance(user.app.screen, CommandLine))
        assert typed(user) == "kill other" and world.asked == []


@pytest.mark.system
async def test_filter_leaves_out_runs_that_fit_not() -> None:
    world = a_world(*SWEEP)
    world.runs[2]["state"] = "paused"
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 3)
        await type_line(user, "pause --state running,paused")
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, Confirm))
        await user.press("y")
        await until(user, lambda: sorted(world.asked) == [("pause", "sweep-1"), ("pause", "sweep-2")])


async def test_tab_completes_verbs_then_runs() -> None:
    async with using(a_world(*SWEEP)) as user:
        await until(user, lambda: len(names(user)) == 3)
        await type_line(user, "sto")
        await until(user, lambda: shown(user)[:1] == ["stop"])
        await user.press("tab")
        await until(user, lambda: typed(user).startswith("stop") and "other" in shown(user))
        await user.press("o")
        await until(user, lambda: shown(user)[:1] == ["other"])


@pytest.mark.system
async def test_versions_and_keys_are_completed() -> None:
    async with using(a_world("sorter")) as user:
        await until(user, lambda: len(names(user)) == 1)
        await type_line(user, "fork sorter@")
        await until(user, lambda: shown(user) == ["sorter@3"])
        await user.press("tab", *"trainer.l")
        await until(user, lambda: "trainer.lr=" in shown(user))


@pytest.mark.system
async def test_fork_sends_the_settings_that_were_typed() -> None:
    world = a_world("r1")
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 1)
        await type_line(user, "fork r1@3 trainer.lr=3e-4")
        await user.press("enter")
        await until(user, lambda: world.asked == [("fork", "r1%403")])
        assert world.bodies[-1][1]["overrides"] == ["trainer.lr=3e-4"]


async def test_rename_sends_the_new_name() -> None:
    world = a_world("r1")
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 1)
        await type_line(user, "rename r1 best")
        await user.press("enter")
        await until(user, lambda: world.bodies == [("runs/r1/rename", {"name": "best"})])


ERRORS = {
    "rename r1": "the new name is missing",
    "stpo r1": "Did you mean stop",
    "stop nobody": "no run named nobody",
    "stop": "no run was named",
    "stop --stat x": "stop has no option --stat",
    "fork r1@3 trainer.learning=1": "trainer.learning",
    "priority r1 high": "priority: high is no whole number",
    "resume r1 --from soon": "a whole number",
    "open pool nowhere": "no pool named nowhere",
    "open device cuda:9": "no device named cuda:9",
    "open r1 nothing": "Its tabs are curves",
    "note r1 'open": "a quote is not closed",
}


@pytest.mark.system
async def test_errors_are_said_in_place() -> None:
    world = a_world("r1")
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 1)
        for text in ERRORS:
            await paste_line(user, text)
            await user.press("enter")
            await until(user, lambda: ERRORS[typed(user)] in " ".join(screen_text(user).split()))
            assert isinstance(user.app.screen, CommandLine) and typed(user) == text and world.asked == []
            await user.press("escape")
            await until(user, lambda: not isinstance(user.app.screen, CommandLine))


@pytest.mark.system
async def test_up_and_down_go_through_the_history() -> None:
    async with using(a_world("r1")) as user:
        await until(user, lambda: len(names(user)) == 1)
        for text in ("stop nobody", "kill nobody"):
            await type_line(user, text)
            await user.press("enter")
            await until(user, lambda: "no run named" in screen_text(user))
            await user.press("escape")
        await type_line(user, "pa")
        await user.press("up", "up", "up")
        assert typed(user) == "stop nobody"
        await user.press("down")
        assert typed(user) == "kill nobody"
        await user.press("down", "down")
        assert typed(user) == "pa"


async def test_unpin_names_what_holds_the_version() -> None:
    world = a_world("r1")
    world.answers["POST versions/r1%403/unpin"] = {"run": "r1", "version": 3}
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 1)
        await type_line(user, "unpin r1@3")
        await user.press("enter")
        await until(user, lambda: "bot still holds it" in screen_text(user))
        await user.press("y")
        await until(user, lambda: "r1@3 is not pinned" in status(user))
        assert world.bodies[-1][0] == "versions/r1%403/unpin"


@pytest.mark.system
async def test_logs_opens_that_tab_of_the_run() -> None:
    async with using(a_world("r1")) as user:
        await until(user, lambda: len(names(user)) == 1)
        await type_line(user, "logs r1")
        await user.press("enter")
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        await until(user, lambda: "lorad logs r1" in line(user, "#status"))
        await type_line(user, "open r1 events")
        await user.press("enter")
        await until(user, lambda: "0 of 0 events" in screen_text(user))
        assert len(user.app.screen_stack) == 2


@pytest.mark.system(but="bill-bill")
@pytest.mark.parametrize(
    ("typed_line", "screen"),
    [
        ("open pool qwen-1", "pool"),
        (f"open device {DEVICE['device']}", "device"),
        ("bill", "bill"),
        ("nodes", "nodes"),
    ],
)
async def test_line_opens_the_screens_of_the_box(typed_line: str, screen: str) -> None:
    world = a_world("r1")
    world.answers |= {"devices": [DEVICE], "nodes": []}
    async with using(world) as user:
        await until(user, lambda: len(names(user)) == 1)
        await type_line(user, typed_line)
        await user.press("enter")
        await until(user, lambda: detail(user) == screen)


async def test_open_offers_no_tab_behind_a_pool() -> None:
    async with using(a_world("r1")) as user:
        await until(user, lambda: len(names(user)) == 1)
        await type_line(user, "open pool q")
        await until(user, lambda: shown(user) == ["qwen-1"])
        await user.press("tab")
        await until(user, lambda: typed(user) == "open pool qwen-1 " and shown(user) == [])


async def test_click_on_a_candidate_takes_it() -> None:
    async with using(a_world("r1")) as user:
        await until(user, lambda: len(names(user)) == 1)
        await type_line(user, "kil")
        await until(user, lambda: shown(user) == ["kill"])
        await user.click(OptionList, offset=(2, 0))
        await until(user, lambda: typed(user) == "kill ")


async def test_readonly_refuses_and_says_so() -> None:
    world = a_world("r1")
    async with using(world, readonly=True) as user:
        await until(user, lambda: len(names(user)) == 1)
        await type_line(user, "pause r1")
        await user.press("enter")
        await until(user, lambda: "Read-only" in screen_text(user))
        assert world.asked == []


def test_tabs_are_those_of_a_run() -> None:
    assert [tab.TITLE for tab in run_screen.TABS] == list(TABS)
    assert all(verb.usage.startswith(name) and verb.says for name, verb in VERBS.items())
