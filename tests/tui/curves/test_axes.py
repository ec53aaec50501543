"""Where the steps of a run lie by tokens and by time."""

import pytest

from lorad.records.measured import Step
from lorad.tui.curves.axes import x_text, x_ticks
from lorad.tui.curves.plot import CurveLook, extent, plot
from lorad.tui.curves.series import Detail, Series, Track
from tests.kit.tui_world import shaped
from tests.tui.test_curves import step


def a_track(*numbers: int, every: int = 1, tokens: int = 100) -> Track:
    track = Track(every)
    track.add(shaped(Step, step(number, tokens=tokens)) for number in numbers)
    return track


def test_tokens_add_up_and_time_begins_at_zero() -> None:
    track = a_track(1, 2, 3)
    assert track.placed("tokens") == {1: 100, 2: 200, 3: 300}
    assert track.placed("time") == {1: 2000, 2: 3000, 3: 4000}  # the first one took two seconds


def test_tokens_of_left_out_steps_are_estimated() -> None:
    assert a_track(4, 8, 12, every=4).placed("tokens") == {4: 400, 8: 800, 12: 1200}


def test_window_lies_where_the_whole_run_has_it() -> None:
    track, fine = a_track(4, 8, 12, every=4), a_track(5, 6, 7)
    fine.parent, track.detail = track, Detail(5, 7, fine)
    assert [fine.place("tokens", number) for number in (5, 6, 7)] == [500, 600, 700]
    assert fine.place("time", 5) == track.place("time", 4) + 1000


def test_later_steps_continue_the_places() -> None:
    track = a_track(1, 2)
    assert track.place("tokens", 2) == 200
    track.join(a_track(3))
    assert track.place("tokens", 3) == 300


def test_place_and_step_are_each_others_inverse() -> None:
    track = a_track(1, 2, 5)
    assert [track.step_at("tokens", track.place("tokens", number)) for number in (1, 2, 5)] == [1, 2, 5]
    assert (track.step_at("tokens", 10_000), track.step_at("step", 77)) == (5, 77)
    assert (track.place("tokens", 0), track.place("tokens", 99)) == (0, 500)


def test_evaluations_lie_between_the_steps_around_them() -> None:
    track = a_track(1, 5)
    track.sets["eval"] = Series()
    for number in (0, 3):
        track.sets["eval"].add(number, 0.5)
    drawn, _ = plot("eval", [track], CurveLook(x="tokens"), *(extent([track], "tokens") or (0, 0)))
    assert list(drawn.curves[0].xs) == [0, 300] and [x for x, _ in drawn.marks] == [0, 300]


def test_window_at_a_finer_grain_keeps_its_evaluations() -> None:
    track, fine = a_track(4, 8, 12, every=4), a_track(5, 6, 7)
    fine.parent, track.detail = track, Detail(4, 8, fine)
    track.sets["eval"] = Series()
    track.sets["eval"].add(12, 0.25)
    drawn, _ = plot("eval", [track], CurveLook(x="tokens"), 400, 800)
    assert list(drawn.curves[0].xs) == [1200]


@pytest.mark.parametrize(
    ("metric", "best"),
    [("reward", (3, 0.003, 0)), ("nll", (3, pytest.approx(1 / 3), 0)), ("kl", None), ("loss", None)],
)
def test_best_is_only_marked_where_better_means_something(metric: str, best: object) -> None:
    track = Track()
    track.add(shaped(Step, step(number, nll=1 / number)) for number in (1, 2, 3))
    drawn, _ = plot(metric, [track], CurveLook(smooth=0.0), 1, 3)
    assert next(iter(drawn.best), None) == best


def test_times_have_round_places() -> None:
    at, texts = x_ticks("time", 0, 2 * 3600_000, 4)
    assert texts == ["0s", "30m", "1h", "1h30m", "2h"] and at[1] == 1800_000
    assert [x_text("time", 61_000), x_text("tokens", 1.2e6), x_text("step", 1200)] == [
        "1m01s",
        "1.2M",
        "1,200",
    ]
