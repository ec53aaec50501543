"""Several boxes in one dashboard: a screen of all, one that is shown, and no action that goes to another."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.tui import watch
from lorad.tui.boxes.screen import BoxesScreen
from lorad.tui.dashboard.screen import Dashboard
from lorad.tui.state_files import state_file
from tests.kit.frozen.boxes import two_boxes
from tests.kit.tui_world import (
    User,
    World,
    a_run,
    busy_world,
    line,
    screen_text,
    until,
    using,
)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    """The world of h2; h3 is refused, and no daemon runs in the home of this machine."""
    world = two_boxes(tmp_path / "home", tmp_path, monkeypatch)
    yield world
    world.live(False)


async def typed(user: User, text: str) -> None:
    await user.press("colon", *("space" if letter == " " else letter for letter in text), "enter")


async def shown(user: User, *words: str, without: str = "") -> None:
    await until(
        user,
        lambda: (
            all(word in screen_text(user) for word in words)
            and not (without and without in screen_text(user))
        ),
    )


async def to_h2(user: User) -> None:
    await shown(user, "bold")
    await typed(user, "box h2")
    await shown(user, "far", " h2 ")
    assert isinstance(user.app.screen, Dashboard)


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_boxes_say_how_they_are(size: tuple[int, int], far: World) -> None:
    async with using(busy_world(), size) as user:
        await shown(user, "bold")
        await user.press("b")
        await shown(user, "reachable", "unreachable", "no daemon")
        (row,) = [row for row in screen_text(user).splitlines() if " h2 " in row]
        assert row.split()[:7] == ["h2", "reachable", "1/2", "1", "1", "1", "1"]
        assert "1 of 3 boxes answer" in screen_text(user)
        await user.press("G")
        await until(user, lambda: "Permission denied" in line(user, "#box-says"))
        assert "`ssh h3` has to work." in line(user, "#box-says")


async def test_a_silent_box_holds_up_nothing(far: World, monkeypatch: pytest.MonkeyPatch) -> None:
    silence = threading.Event()
    answer = dict(far.answers["status"])
    far.answers["status"] = lambda query: answer if silence.wait(60) else {}
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    async with using(busy_world()) as user:
        await shown(user, "bold")
        await typed(user, "boxes")
        await shown(user, "late", "still asking", "unreachable")
        await user.press("G")
        await until(user, lambda: "Permission denied" in line(user, "#box-says"))
        silence.set()
        await shown(user, "reachable", without="late")


@pytest.mark.system
async def test_enter_shows_a_box_and_acts_there(far: World) -> None:
    here = busy_world()
    async with using(here) as user:
        await shown(user, "bold")
        await user.press("b")
        await shown(user, "reachable")
        await user.press("j", "enter")
        await shown(user, "far", " h2 ", without="bold")
        await user.press("P")
        await until(user, lambda: far.asked)
        assert far.asked == [("pause", "far")] and here.asked == []
        await shown(user, "$ lorad --host h2 pause far")
        await typed(user, "box local")
        await shown(user, "bold", " here ", without="waits-far")
        await user.press("P")
        await until(user, lambda: here.asked)
        assert here.asked == [("pause", "bold")] and len(far.asked) == 1


@pytest.mark.system
async def test_alarms_are_acknowledged_on_their_box(far: World, tmp_path: Path) -> None:
    dead = a_run("dead", state="ended", reason="failed", detail="out of memory", ended_at=time.time())
    here = World(dead, a_run("old", state="ended", reason="failed", ended_at=dead["ended_at"]))
    far.runs[:] = [dead]
    kept = state_file("acknowledged.json")
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({f"old {dead['ended_at']}": dead["ended_at"]}))  # when there was one box
    async with using(here) as user:
        await until(user, lambda: line(user, "#alarmed").startswith("1 alarm  "))
        await typed(user, "box h2")
        await until(user, lambda: " h2 " in screen_text(user) and line(user, "#alarmed").startswith("1 al"))
        await user.press("z")
        await until(user, lambda: not line(user, "#alarmed"))
        await user.press("b")
        await shown(user, "reachable")
        (row,) = [row.split() for row in screen_text(user).splitlines() if " reachable" in row]
        assert row[5:7] == ["1", "0"]  # it failed, and has no alarm
        await typed(user, "box local")
        await shown(user, " here ", "dead")
        assert line(user, "#alarmed").startswith("1 alarm  ")
    async with using(World(dead)) as user:
        await until(user, lambda: line(user, "#alarmed").startswith("1 alarm  "))
        await typed(user, "box h2")
        await shown(user, " h2 ", "dead")
        assert not line(user, "#alarmed")


async def test_a_question_names_its_box(far: World) -> None:
    async with using(busy_world()) as user:
        await to_h2(user)
        await user.press("x")
        await shown(user, "Kill far on h2?")


async def test_a_refused_box_leaves_the_one_shown(far: World) -> None:
    async with using(busy_world()) as user:
        await shown(user, "bold")
        await typed(user, "box h3")
        await shown(user, "Permission denied", "bold")
        await user.press("P")
        await until(user, lambda: "paus" in line(user, "#status"))
        await typed(user, "box nowhere")
        await shown(user, "there is no box nowhere", "local, h2, h3")


@pytest.mark.system
async def test_other_boxes_are_read_only_too(far: World) -> None:
    async with using(busy_world(), readonly=True) as user:
        await to_h2(user)
        assert "READ-ONLY" in screen_text(user)
        await user.press("P")
        await shown(user, "Read-only: nothing is done.")
        await typed(user, "kill far")
        await shown(user, "✖ Read-only: nothing is done.")
        assert far.asked == [] and {path for path, _ in far.bodies} == {"select"}


@pytest.mark.system
async def test_rights_are_those_on_the_box(far: World) -> None:
    far.answers["status"] = {"pid": 1, "caller": {"user": "bob", "admin": False}}
    async with using(busy_world()) as user:
        await to_h2(user)
        await shown(user, "belongs to ann")
        await user.press("P")
        await shown(user, "here it can only be looked at")
        await typed(user, "box local")
        await shown(user, "bold", without="belongs to ann")


async def test_an_action_stays_on_its_box(far: World) -> None:
    here = busy_world()
    going = threading.Event()
    here.answers["POST runs/bold/pause"] = lambda body: (
        a_run("bold", state="stopping") if going.wait(60) else {}
    )
    async with using(here) as user:
        await shown(user, "bold")
        await user.press("space", "space", "P")
        await until(user, lambda: here.bodies)
        await to_h2(user)
        going.set()
        await until(user, lambda: here.asked)
        assert here.asked == [("pause", "calm")] and far.asked == []


@pytest.mark.system
async def test_each_box_keeps_its_screens(far: World) -> None:
    async with using(busy_world()) as user:
        await shown(user, "bold")
        await user.press("N")
        await shown(user, "lorad nodes")
        await typed(user, "box h2")
        await shown(user, "far")
        await typed(user, "box here")
        await shown(user, "lorad --host here nodes")
        assert not isinstance(user.app.screen_stack[-1], BoxesScreen)


async def all_runs(user: User) -> None:
    await shown(user, "bold")
    await typed(user, "box all")
    await shown(user, "waits-far", "3 runs of 1 of 3 boxes")


@pytest.mark.system(but="size0")
@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_runs_of_all_boxes_name_theirs(size: tuple[int, int], far: World) -> None:
    async with using(busy_world(), size) as user:
        await all_runs(user)
        await shown(user, "h3: host h3 cannot be reached", "here: no daemon answers", "running !!")
        rows = [row.split()[:2] for row in screen_text(user).splitlines() if "h2" in row.split()[:1]]
        assert rows == [["h2", "far"], ["h2", "waits-far"], ["h2", "broken"]]
        await user.press("enter")
        await shown(user, "attempt 1", " h2 ")
        assert user.app.screen.targets("run") == ["far"]  # type: ignore[attr-defined]


async def test_an_action_goes_where_its_row_is(far: World) -> None:
    here = busy_world()
    async with using(here) as user:
        await all_runs(user)
        await user.press("P")
        await shown(user, "$ lorad --host h2 pause far")
        assert far.asked == [("pause", "far")] and here.asked == []
        await user.press("x")
        await shown(user, "Kill h2/far?", "Its driver is ended at once")


async def test_a_line_without_a_box_is_refused(far: World) -> None:
    here = busy_world()
    here.answers["POST select"] = {"items": here.runs[:1]}
    async with using(here) as user:
        await all_runs(user)
        await typed(user, "kill bold")
        await shown(user, "does not say on which box", "`box NAME` shows one")
        assert here.asked == far.asked == []


async def test_rows_of_others_are_only_looked_at(far: World) -> None:
    far.answers["status"] = {"pid": 1, "caller": {"user": "bob", "admin": False}}
    async with using(busy_world()) as user:
        await all_runs(user)
        await user.press("P")
        await shown(user, "h2/far belongs to ann")
        assert far.asked == []


async def test_all_boxes_are_read_only_too(far: World) -> None:
    async with using(busy_world(), readonly=True) as user:
        await all_runs(user)
        await user.press("P")
        await shown(user, "Read-only: nothing is done.")
        assert far.asked == []
