"""The curves of runs: what is kept of their steps, how it is read, and what the keys and the mouse do."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual.app import App, ComposeResult

from lorad.client.client import Client
from lorad.errors import DaemonUnreachable
from lorad.records.measured import Step
from lorad.records.runs import Run
from lorad.tui.curves.chart_widget import Chart
from lorad.tui.curves.series import FINE, KEPT, Series, Track, Window
from lorad.tui.curves.side import CurvesSide
from lorad.tui.curves.step_reader import StepReader
from lorad.tui.curves.step_table import bar, figures, spent
from lorad.tui.curves.tab import CurvesTab
from lorad.tui.feed import Changes
from lorad.tui.run.screen import RunScreen
from lorad.tui.widgets.picker import Choose
from tests.kit.tui_world import (
    HOSTILE,
    SHOWN,
    Prepared,
    User,
    World,
    a_run,
    screen_text,
    shaped,
    until,
    using,
)

Json = dict[str, Any]
ALL = Changes(everything=True)


def step(number: int, **metrics: Any) -> Json:
    metrics = {"reward": number / 1000, "loss": 1.0 / number, "kl": 0.1, "seconds": 2.0, **metrics}
    return {"step": number, "attempt": 1, "at": 1000.0 + number, "version": number, "metrics": metrics}


def serve(world: World, run: str, steps: Callable[[], int], make: Callable[[int], Json] = step) -> list[Json]:
    """Steps 1 to `steps()` of a run, answered as the daemon does: the queries that came."""
    asked: list[Json] = []

    def answer(query: Json) -> list[Json]:
        asked.append(query)
        after, limit, every = (
            int(query.get(key, default)) for key, default in (("after", 0), ("limit", 0), ("every", 1))
        )
        numbers = list(range((after // every + 1) * every, steps() + 1, every))[:limit]
        last = [steps()] if every > 1 and steps() > after and steps() not in numbers else []
        return [make(number) for number in numbers + last]

    world.answers[f"runs/{run}/steps"] = answer
    return asked


# -- what is kept --------------------------------------------------------------------------------------------
def test_nan_values_are_left_out_and_counted() -> None:
    series = Series()
    for x, y in enumerate([1.0, math.nan, None, math.inf, 2, "x"]):
        series.add(x, y)
    assert (list(series.ys), list(series.bad)) == ([1.0, 2.0], [1, 2, 3, 5])


def test_smoothing_is_an_unbiased_moving_average() -> None:
    series, average, share = Series(), 0.0, 0.0
    for x in range(50):
        series.add(x, float(x % 7))
        view = series.view(0.9, False)
        average, share = 0.9 * average + 0.1 * (x % 7), 0.9 * share + 0.1
        assert view.ys[-1] == pytest.approx(average / share)
    assert len(view.ys) == 50


def test_logarithms_leave_out_what_is_not_above_zero() -> None:
    series = Series()
    for x, y in enumerate([10.0, 0.0, -1.0, 1000.0]):
        series.add(x, y)
    view = series.view(0.0, True)
    assert (list(view.xs), list(view.ys), list(view.left)) == ([0, 3], [1.0, 3.0], [1, 2])


def test_thinned_run_keeps_multiples_and_last_step() -> None:
    track = Track(4)
    for numbers in ([4, 8, 9], [12, 16, 18]):
        more = Track()
        more.add(shaped(Step, step(number)) for number in numbers)
        track.join(more)
    assert list(track.steps) == [4, 8, 12, 16, 18] == list(track.of("reward").xs)


def test_window_follows_newest_step_until_moved() -> None:
    window = Window()
    window.zoom(0.5, None, 1, 100)
    assert window.bounds(1, 100) == (51, 100) and window.bounds(1, 110) == (61, 110)
    window.move(-0.5, 1, 110)
    assert window.bounds(1, 110) == window.bounds(1, 120) == (36, 85)
    window.move(9, 1, 120)
    assert window.bounds(1, 130) == (81, 130)


def test_zoom_keeps_the_step_under_the_mouse() -> None:
    window = Window()
    window.zoom(0.5, 25, 0, 99)
    low, high = window.bounds(0, 99)
    assert high - low + 1 == 50 and (25 - low) / (high - low) == pytest.approx(25 / 99, abs=0.03)
    window.zoom(2, 25, 0, 99)
    window.zoom(2, 25, 0, 99)
    assert (window.span, window.bounds(0, 99)) == (None, (0, 99))


# -- reading -------------------------------------------------------------------------------------------------
def read_all(reader: StepReader, world: World, window: tuple[int, int] | None = None, **run: Any) -> Track:
    """Until there is no more."""
    client, track, row, changes = (
        Client(transport=Prepared(world)),
        Track(),
        shaped(Run, a_run("a", **run)),
        ALL,
    )
    while parts := reader.read(client, changes, row, (), window):
        track = parts[0].applied(track)
        if not parts[0].more:
            return track
        changes = Changes()
    return track


def test_pages_join_without_gap_or_double() -> None:
    world = World(a_run("a"))
    asked = serve(world, "a", lambda: 5001)
    assert list(read_all(StepReader(), world, step=5001, created_at=1.0).steps) == list(range(1, 5002))
    assert [query["after"] for query in asked] == ["0", "2000", "4000"]


def test_only_windows_are_read_in_full() -> None:
    world = World(a_run("a"))
    asked = serve(world, "a", lambda: 1_000_000)
    reader = StepReader()
    track = read_all(reader, world, step=1_000_000, created_at=1.0)
    assert len(track.steps) <= KEPT + 1 and track.steps[-1] == 1_000_000 and track.every == 128
    row = shaped(Run, a_run("a", created_at=1.0))
    (part,) = reader.read(Client(transport=Prepared(world)), Changes(), row, (), (5000, 5500))
    window = part.applied(track).within(5000, 5500)
    assert window.every == 1 and set(range(5000, 5501)) <= set(window.steps) and len(window.steps) <= FINE
    assert sum(int(query["limit"]) for query in asked) < 20_000


def test_growing_run_is_thinned_beside_its_window() -> None:
    world, many = World(a_run("a")), [8000]
    asked = serve(world, "a", lambda: many[0])
    reader, client = StepReader(), Client(transport=Prepared(world))
    row = shaped(Run, a_run("a", step=8000, created_at=1.0))
    track = read_all(reader, world, step=8000, created_at=1.0)
    for many[0] in range(8100, 8600, 100):
        for part in reader.read(client, ALL, row, (), (many[0] - 199, many[0])):
            track = part.applied(track)
        asked.clear() if many[0] < 8500 else None
    near = track.within(many[0] - 199, many[0])
    assert (track.every, near.every) == (2, 1) and list(near.steps)[-100:] == list(range(8401, 8501))
    assert {query["after"] for query in asked} == {"8400"}


def test_a_resume_begins_anew() -> None:
    world, reader = World(a_run("a")), StepReader()
    serve(world, "a", lambda: 9)
    read_all(reader, world, created_at=1.0)
    row = shaped(Run, a_run("a", created_at=1.0, attempt=2))
    (part,) = reader.read(Client(transport=Prepared(world)), ALL, row, (), None)
    assert part.reset and part.steps is not None and list(part.steps.steps) == list(range(1, 10))


def test_missing_run_is_reported_beside_others() -> None:
    world = World(a_run("a"))
    serve(world, "a", lambda: 3)
    parts = StepReader().read(
        Client(transport=Prepared(world)), ALL, shaped(Run, a_run("a")), ("lost",), None
    )
    assert {part.run: bool(part.gone) for part in parts} == {"a": False, "lost": True}


def test_interrupted_reading_loses_no_step() -> None:
    world, reader, failures = World(a_run("a")), StepReader(), [DaemonUnreachable("gone")]
    serve(world, "a", lambda: 9)

    def evals(_: Json) -> list[Json]:
        for failure in failures:
            raise failure
        return []

    world.answers["runs/a/evals"] = evals
    with pytest.raises(DaemonUnreachable):
        read_all(reader, world, created_at=1.0)
    failures.clear()
    assert list(read_all(reader, world, created_at=1.0).steps) == list(range(1, 10))


# -- where the time goes -------------------------------------------------------------------------------------
def test_parts_of_a_step_add_up() -> None:
    values = {"seconds": 2.0, "seconds_sample": 1.0, "seconds_publish": 0.5, "seconds_attest": 0.2}
    found = spent(values)
    assert found == pytest.approx({"sample": 1.0, "publish": 0.3, "attest": 0.2, "other": 0.5})
    assert bar(found, 20, [""] * 6).plain == "█" * 10 + "▒" * 3 + "░" * 2 + "·" * 5


def test_step_without_numbers_shows_nan() -> None:
    track = Track()
    track.add([shaped(Step, step(7, reward=None, seconds=None, seconds_sample=1.0))])
    told = figures(7, track.values(7), 24, 20).plain.splitlines()
    assert told[0] == "step 7  @7" and told[1].split() == ["reward", "NaN"]
    assert spent(track.values(7)) == {"sample": 1.0}


def test_unmeasured_figure_is_a_dash() -> None:
    told = [line.split() for line in figures(7, {"reward": 0.5}, 24, 20).plain.splitlines()]
    assert told[1] == ["reward", "0.500"] and ["kl", "-"] in told and ["mismatch", "-"] in told


# -- the tab -------------------------------------------------------------------------------------------------
@asynccontextmanager
async def looking(world: World, size: tuple[int, int] = (80, 24)) -> AsyncIterator[User]:
    """At the curves of the first run."""
    async with using(world, size) as user:
        name = world.runs[0]["name"]
        await until(user, lambda: screen_text(user))
        user.app.open_run(name)  # type: ignore[attr-defined]
        await until(
            user, lambda: isinstance(user.app.screen, RunScreen) and "◆ held-out" in screen_text(user)
        )
        yield user


def a_world(steps: int = 400, *others: Json) -> World:
    world = World(a_run("first", step=steps), *others)
    serve(world, "first", lambda: steps)
    world.answers["runs/first/evals"] = [
        {"step": number, "score": 0.25} for number in range(0, steps + 1, 100)
    ]
    return world


def tab(user: User) -> CurvesTab:
    return user.app.screen.query_one(CurvesTab)


def charts(user: User) -> list[Chart]:
    return [chart for chart in user.app.screen.query(Chart) if chart.display]


@pytest.mark.parametrize(("size", "many"), [((80, 24), 1), ((160, 50), 4), ((200, 60), 9)])
async def test_there_are_as_many_charts_as_fit(size: tuple[int, int], many: int) -> None:
    async with looking(a_world(), size) as user:
        await until(user, lambda: len(charts(user)) == many)
        await until(user, lambda: "reward  0.400" in screen_text(user))
        await user.press("enter")
        await until(user, lambda: len(charts(user)) == 1)


@pytest.mark.system
@pytest.mark.parametrize("size", [(12, 3), pytest.param((300, 90), marks=pytest.mark.long)])
async def test_the_curves_fit_any_terminal(size: tuple[int, int]) -> None:
    async with looking(a_world()) as user:
        await user.resize_terminal(*size)
        await user.press("j", "e", "L", "left", "plus", "l", "c", "t", "f", "end")
        await user.resize_terminal(80, 24)
        await until(user, lambda: "loss" in screen_text(user) and "held-out" in screen_text(user))


async def test_figures_never_wrap_while_their_column_shrinks() -> None:
    side = CurvesSide()

    class Host(App[None]):
        def compose(self) -> ComposeResult:
            yield side

    async with Host().run_test(size=(60, 20)) as user:
        side.styles.width = 60
        await until(user, lambda: side.size.width > 50)
        side.tell(
            3,
            {"reward": 0.5, "loss": 0.1, "kl": 0.01, "entropy": 0.7, "grad_norm": 0.5},
            lambda room: [],
            [""],
        )
        side.styles.width = 25
        await until(user, lambda: side.size.width < 25 and "grad norm" in screen_text(user))
        figures = [line for line in screen_text(user).splitlines() if line.strip()]
        assert [line.split()[0] for line in figures] == [
            *("step", "reward", "reward", "loss", "kl", "entropy", "grad", "mismatch", "clipped")
        ]
        assert figures[1].split() == ["reward", "0.500"] and figures[6].split() == ["grad", "norm", "0.500"]


async def test_cursor_shows_the_values_of_its_step() -> None:
    async with looking(a_world()) as user:
        await until(user, lambda: "reward  0.400" in screen_text(user))
        await user.press("left", "left", "shift+left")
        await until(user, lambda: "reward  0.388" in screen_text(user) and "step 388" in screen_text(user))
        await user.press("home")
        await until(user, lambda: "step 1 " in screen_text(user) and "reward  0.001" in screen_text(user))
        await user.press("end")
        await until(user, lambda: "reward  0.400" in screen_text(user))


async def test_mouse_places_the_cursor_and_wheel_zooms() -> None:
    async with looking(a_world()) as user:
        await until(user, lambda: "reward  0.400" in screen_text(user))
        await user.hover(Chart, offset=(30, 5))
        await until(user, lambda: tab(user).scene.hover)
        hovered = tab(user).scene.step
        await user.click(Chart, offset=(30, 5))
        await until(
            user, lambda: tab(user).scene.cursor == hovered and f"step {hovered}" in screen_text(user)
        )
        charts(user)[0].post_message(Chart.Pointed(0, hovered, zoomed=-1))
        await until(user, lambda: tab(user).scene.look.window.span == 200 and "of 0–400" in screen_text(user))


async def test_keys_zoom_and_move_the_window() -> None:
    async with looking(a_world()) as user:
        await until(user, lambda: "steps 0–400" in screen_text(user))
        await user.press("t", "t")
        await until(user, lambda: "steps 201–400 of" in screen_text(user))
        await user.press("h")
        await until(user, lambda: "steps 151–350 of" in screen_text(user))
        await user.press("0")
        await until(user, lambda: "steps 0–400 " in screen_text(user))


@pytest.mark.system
async def test_metric_is_chosen_by_key_or_name() -> None:
    world = a_world()
    serve(
        world, "first", lambda: 9, lambda number: step(number, staleness=2.0, kl=None if number > 6 else 0.5)
    )
    async with looking(world) as user:
        await user.press("j", "j")
        await until(user, lambda: "KL  NaN" in screen_text(user) and "3 NaN" in screen_text(user))
        await user.press("m")
        await until(user, lambda: isinstance(user.app.screen, Choose))
        await user.press(*"stale", "enter")
        await until(user, lambda: "staleness  2.000" in screen_text(user))
        assert "--metric staleness" in screen_text(user)


async def test_a_logarithmic_chart_says_what_it_leaves_out() -> None:
    world = a_world()
    serve(world, "first", lambda: 9, lambda number: step(number, reward=number - 3.0))
    async with looking(world) as user:
        await until(user, lambda: "reward  6.000" in screen_text(user))
        await user.press("L")
        await until(user, lambda: "3 ≤ 0 left out · log" in screen_text(user))


@pytest.mark.system
async def test_another_run_can_be_overlaid_by_name() -> None:
    world = a_world(400, a_run("other", step=300), a_run(HOSTILE))
    serve(world, "other", lambda: 300, lambda number: step(number, reward=0.9))
    async with looking(world, (100, 30)) as user:
        await user.press("a")
        await until(user, lambda: isinstance(user.app.screen, Choose) and SHOWN in screen_text(user))
        await user.press(*"oth", "enter")
        await until(
            user, lambda: "A 0.400  B –" in screen_text(user) and "B ─── ── other" in screen_text(user)
        )
        assert "lorad plot first other" in screen_text(user)
        tab(user).scene.cursor = 299
        await user.press("right")
        await until(user, lambda: "A 0.300  B 0.900" in screen_text(user))
        await user.press("A")
        await until(user, lambda: "other" not in screen_text(user))


@pytest.mark.system
async def test_overlaid_run_that_is_deleted_disappears() -> None:
    world = a_world(400, a_run("other"))
    serve(world, "other", lambda: 300)
    async with looking(world) as user:
        tab(user).scene.add("other")
        user.app.feed.again()  # type: ignore[attr-defined]
        await until(user, lambda: tab(user).scene.tracks["other"].steps)
        del world.runs[1]
        world.tell("other")
        await until(user, lambda: user.app._notifications)
        assert [note.message for note in user.app._notifications] == ["There is no run other."]
        assert tab(user).scene.others == ()


@pytest.mark.system
async def test_new_steps_appear_by_themselves() -> None:
    world, many = a_world(), [3]
    serve(world, "first", lambda: many[0])
    async with looking(world) as user:
        await until(user, lambda: "reward  0.003" in screen_text(user))
        many[0] = 7
        world.tell("first", "step")
        await until(user, lambda: "reward  0.007" in screen_text(user))


@pytest.mark.system
async def test_smoothing_is_named_and_themes_differ() -> None:
    async with looking(a_world()) as user:
        await until(user, lambda: "ema 0.6" in screen_text(user))
        await user.press("e")
        await until(user, lambda: "ema 0.9" in screen_text(user))
        seen = set()
        for _ in range(4):
            await user.press("T")
            await user.pause()
            seen.add(str([segment.style for segment in charts(user)[0].render_line(5)][-1]))
        assert len(seen) == 4
