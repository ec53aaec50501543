"""The versions tab: the tree, what is said about each version, and what is done with them."""

from typing import Any

import pytest

from lorad.client.transport import Json
from lorad.tui.feed import PAUSE, Pauses
from lorad.tui.run.screen import RunScreen
from lorad.tui.screens.dialogs import AskDialog
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import PAGE, Rows
from tests.kit.tui_samples import a_version, opened
from tests.kit.tui_world import HOSTILE, SHOWN, User, World, a_run, line, screen_text, until, using


def a_world(versions: list[Json], **more: Any) -> World:
    world = World(a_run("a", version=versions[-1]["version"] if versions else None, **more))
    world.answers["versions"] = lambda query: versions
    return world


def rows(user: User) -> Rows:
    return user.app.screen.query_one("#versions-rows", Rows)


def head(user: User) -> str:
    return user.app.screen.query_one("#versions-head", Line).said.plain


async def test_versions_have_signs_and_words() -> None:
    held = a_version(1, pinned=True, loaded=True, aliases=["bot"], attested="inconclusive")
    async with using(a_world([a_version(0, path=None), held, a_version(2)]), (160, 40)) as user:
        await opened(user, 3, "◉ @2")
        shown = screen_text(user)
        assert (
            "● @1" in shown and "⚑ pinned ▲ loaded" in shown and "bot" in shown and "≈ inconclusive" in shown
        )
        assert "◉ current" in shown and "∅ no files" in shown and "16/32" in shown and "64.0 KiB" in shown
        assert "3 versions · ◉ current @2 · 1 pinned · 1 loaded · 128.0 KiB on disk" in head(user)


@pytest.mark.system
async def test_what_a_resume_rewound_is_a_branch() -> None:
    versions = [*(a_version(number) for number in range(4)), a_version(4, parent=1, step=2)]
    async with using(a_world(versions, origin="base@9"), (120, 40)) as user:
        await opened(user, 3, "◇ base@9")
        assert rows(user).names == ["4", "3", "2", "1", "0", "origin"]
        shown = screen_text(user)
        assert "│ ○ @3" in shown and "├─○ @2" in shown and "● @1" in shown


@pytest.mark.system
async def test_enter_on_a_fork_opens_its_run() -> None:
    world = a_world([a_version(0), a_version(1)])
    world.runs.append(a_run("a-fork", origin="a@0"))
    async with using(world) as user:
        await opened(user, 3, "├─→ a-fork")
        await user.press("j", "enter")
        await until(user, lambda: "a-fork" in line(user, "#title"))
        assert isinstance(user.app.screen, RunScreen)


@pytest.mark.system
async def test_action_applies_to_the_selected_version() -> None:
    world = a_world([a_version(0), a_version(1)])
    world.answers["POST versions/a%401/pin"] = a_version(1, pinned=True)
    async with using(world) as user:
        await opened(user, 3, "◉ @1")
        await user.press("i")
        await until(user, lambda: ("versions/a%401/pin", {}) in world.bodies)
        await until(user, lambda: "lorad pin a@1   a@1 is pinned." in line(user, "#status"))
        world.runs[0]["step"] = 9
        world.tell("a", "step")
        await until(user, lambda: "9/10" in line(user, "#title"))
        assert "a@1 is pinned." in line(user, "#status")


@pytest.mark.system
async def test_only_marked_versions_are_targets() -> None:
    world = a_world([a_version(0), a_version(1)], origin="base@9")
    async with using(world) as user:
        await opened(user, 3, "◇ base@9")
        await user.press("g", "space", "space", "space")
        await until(user, lambda: "3 marked" in head(user))
        assert isinstance(screen := user.app.screen, RunScreen) and screen.targets("version") == [
            "a@1",
            "a@0",
        ]


@pytest.mark.system
async def test_swap_suggests_the_alias_of_this_run() -> None:
    async with using(a_world([a_version(0, aliases=["bot"]), a_version(1)])) as user:
        await opened(user, 3, "◉ @1")
        await user.press("w")
        await until(
            user, lambda: isinstance(user.app.screen, AskDialog) and "lorad swap bot a@1" in screen_text(user)
        )


@pytest.mark.system
async def test_a_new_version_appears_and_the_cursor_stays() -> None:
    versions = [a_version(0), a_version(1)]
    world = a_world(versions)
    async with using(world) as user:
        await opened(user, 3, "◉ @1")
        versions.append(a_version(2))
        world.runs[0]["version"] = 2
        world.tell("a", "version")
        await until(user, lambda: "◉ @2" in screen_text(user))
        assert rows(user).key == "1" and "● @1" in screen_text(user)
        await user.press("c")
        await until(user, lambda: rows(user).key == "2")


@pytest.mark.system
async def test_thousands_of_versions_page() -> None:
    async with using(a_world([a_version(number) for number in range(3000)])) as user:
        await opened(user, 3, "◉ @2999")
        assert rows(user).row_count == PAGE and "page 1/15" in head(user)
        await user.press("G")
        await until(user, lambda: rows(user).key == "0" and "@0" in screen_text(user))


def test_slow_answers_are_asked_for_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pace = [100.0], Pauses()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with pace.asking():
        now[0] += 0.5
    assert not pace.is_due
    now[0] += 0.5 * PAUSE
    assert pace.is_due


async def test_names_of_others_are_shown_literally() -> None:
    odd = a_version(0, aliases=[HOSTILE], sha256=HOSTILE, attested=HOSTILE, attestation=HOSTILE, path=HOSTILE)
    async with using(a_world([odd], origin=HOSTILE), (200, 40)) as user:
        await opened(user, 3, "◉ @0")
        await until(user, lambda: SHOWN in screen_text(user))
        assert "\x1b" not in screen_text(user)


@pytest.mark.system
@pytest.mark.parametrize("size", [pytest.param((40, 10), marks=pytest.mark.long), (12, 3)])
async def test_run_without_versions_fits_small_terminals(size: tuple[int, int]) -> None:
    async with using(a_world([])) as user:
        await opened(user, 3, "No versions yet")
        await user.resize_terminal(*size)
        await user.press("c", "i", "f", "enter")
        await user.resize_terminal(120, 40)
        await until(user, lambda: "No versions yet" in screen_text(user))
