"""What a user chooses of curves: metrics, x, runs, the best; and that it is there the next time."""

import os
from pathlib import Path

import pytest

from lorad.tui.curves.remembered import choices
from lorad.tui.run.screen import RunScreen
from lorad.tui.widgets.picker import Choose
from lorad.tui.widgets.table import Rows
from tests.kit.tui_world import a_run, screen_text, until, using
from tests.tui.test_curves import a_world, looking, serve, step, tab


@pytest.mark.system
async def test_x_goes_by_tokens_and_time() -> None:
    world = a_world(4)
    serve(world, "first", lambda: 4, lambda number: step(number, tokens=1000))
    async with looking(world) as user:
        await user.press("u")
        await until(user, lambda: "tokens 0–4" in screen_text(user) and "--x tokens" in screen_text(user))
        await user.press("left")
        await until(user, lambda: "reward  0.003" in screen_text(user))
        await user.press("u")
        await until(user, lambda: "time 0s–5s" in screen_text(user))


@pytest.mark.system
async def test_other_runs_show_their_values_at_equal_tokens() -> None:
    world = a_world(4, a_run("other", step=9))
    serve(world, "first", lambda: 4, lambda number: step(number, tokens=1000))
    serve(world, "other", lambda: 9, lambda number: step(number, tokens=500))
    async with looking(world, (100, 30)) as user:
        tab(user).compare(["other"])
        tab(user).action_look("x")
        user.app.feed.again()  # type: ignore[attr-defined]
        await until(user, lambda: tab(user).scene.tracks["other"].steps)
        await user.press("home")
        await until(user, lambda: "A 0.001  B 0.002" in screen_text(user))


@pytest.mark.system
async def test_choices_are_there_the_next_time() -> None:
    async with looking(a_world()) as user:
        await user.press("e", "u", "b", "j", "D", "m")
        await until(user, lambda: isinstance(user.app.screen, Choose))
        await user.press(*"seconds", "enter")
        await until(user, lambda: tab(user).scene.name == "seconds")
    async with looking(a_world()) as user:
        scene = tab(user).scene
        assert (scene.look.smooth, scene.look.x, scene.look.best) == (0.9, "tokens", False)
        assert scene.metrics[0] == "reward" and scene.metrics[-1] == "seconds" and "loss" not in scene.metrics


@pytest.mark.system
async def test_system_metrics_are_found_by_that_word() -> None:
    async with looking(a_world()) as user:
        await user.press("m", *"system")
        await until(user, lambda: "seconds of the step" in screen_text(user))
        assert "gradient norm" not in screen_text(user)


@pytest.mark.system
async def test_last_chart_cannot_be_hidden() -> None:
    async with looking(a_world()) as user:
        await user.press(*"D" * 20)
        await until(user, lambda: len(tab(user).scene.metrics) == 1)


async def test_damaged_file_of_choices_is_as_none() -> None:
    path = Path(os.environ["XDG_STATE_HOME"]) / "lorad" / "curves.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"smooth": "much"}')
    assert choices().smooth == 0.6
    path.write_text('{"smooth": 0.123, "x": "miles"}')
    assert (choices().look().smooth, choices().look().x) == (0.6, "step")


@pytest.mark.system
async def test_choices_hold_where_they_cannot_be_kept() -> None:
    os.environ["XDG_STATE_HOME"] = "/proc/none"
    async with looking(a_world()) as user:
        await user.press("e")
        await until(user, lambda: "ema 0.9" in screen_text(user))


async def test_marked_runs_of_the_dashboard_are_compared() -> None:
    world = a_world(400, a_run("other", step=300), a_run("third", step=300))
    serve(world, "other", lambda: 300)
    async with using(world, (100, 30)) as user:
        await until(user, lambda: "third" in screen_text(user))
        marked = user.app.screen.query_one("#runs", Rows).names[:2]
        await user.press("space", "space", "enter")  # the row under the cursor is the third
        await until(user, lambda: isinstance(user.app.screen, RunScreen))
        assert [*tab(user).scene.tracks] == marked


async def test_more_marked_runs_than_colours_are_said() -> None:
    async with looking(a_world()) as user:
        tab(user).compare([f"run-{number}" for number in range(9)])
        assert len(tab(user).scene.tracks) == 6
        await until(user, lambda: any("told apart" in note.message for note in user.app._notifications))
