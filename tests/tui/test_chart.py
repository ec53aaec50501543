"""Charts in text: any values, any number of them, any box; round numbers, spikes,
and several distinct runs.
"""

import math
from array import array

import pytest

from lorad.tui.curves.axes import decades, labels, short, ticks
from lorad.tui.curves.drawing import GUTTER, Curve, Picture, Plot, draw
from lorad.tui.curves.series import Series


def curve(*values: float, **more: object) -> Curve:
    series = Series()
    for x, y in enumerate(values):
        series.add(x, y)
    return Curve(series.xs, series.ys, **more)  # type: ignore[arg-type]


def plot(*curves: Curve, last: int, **more: object) -> Plot:
    return Plot(curves, 0, last, **more)  # type: ignore[arg-type]


def plain(picture: Picture | None) -> str:
    assert picture is not None
    return "\n".join("".join(row) for row in picture.chars)


def looks(picture: Picture | None) -> set[str]:
    assert picture is not None
    return {look for row in picture.looks for look in row}


@pytest.mark.parametrize(
    "values", [(0.5,), (math.nan, 1.0, math.inf, 2.0), (-1.7e308, 1.7e308), (0.0, 0.0), (5e-324, 0.0)]
)
@pytest.mark.parametrize("size", [(0, 0), (1, 1), (12, 3), (13, 3), (80, 20)])
def test_a_curve_of_any_values_fits_any_box(values: tuple[float, ...], size: tuple[int, int]) -> None:
    picture = draw(plot(curve(*values), last=3, marks=[(0, 0.5)]), *size)
    if picture is not None:
        assert len(picture.chars) == size[1] and {len(row) for row in picture.chars + picture.looks} == {
            size[0]
        }


def test_nothing_but_nan_is_nothing_to_draw() -> None:
    assert draw(plot(curve(math.nan, math.nan), last=1), 40, 10) is None


def test_rising_values_rise_across_the_chart() -> None:
    rows = plain(draw(plot(curve(*range(100)), last=99), 40, 12)).splitlines()
    assert rows[0][GUTTER:].strip("┈ ") and not rows[0][GUTTER:30].strip("┈ ")
    assert rows[-2][GUTTER] not in "┈ " and not rows[-2][20:].strip("┈ ")


def test_spike_is_cut_and_marked() -> None:
    values = [math.sin(x / 9) for x in range(2000)]
    values[700] = 1000.0
    cut, whole = (draw(plot(curve(*values), last=1999, spikes=spikes), 80, 20) for spikes in (False, True))
    assert cut is not None and whole is not None and (cut.cut, whole.cut) == (1, 0)
    assert "▴" in plain(cut) and "1000" not in plain(cut).split("\n", 3)[0] and "1000┤" in plain(whole)


def test_all_spikes_are_shown_on_demand() -> None:
    rough, smooth = curve(*[1.0] * 90, 500.0, *[1.0] * 90, ground=True), curve(*[1.0] * 181)
    assert "400┤" in plain(draw(plot(rough, smooth, last=180, spikes=True), 60, 16))


def test_spike_is_never_lost_between_columns() -> None:
    values = [0.0] * 8000
    values[4321] = 7.0
    picture = draw(plot(curve(*values), last=7999), 60, 10)
    assert picture is not None and any(look == "run0" for look in picture.looks[0] + picture.looks[1])


def test_runs_differ_in_dashes_and_letters_too() -> None:
    flat, high = curve(*[1.0] * 200, place=0, letter="A"), curve(*[2.0] * 200, place=1, letter="B")
    picture = draw(plot(high, flat, last=199), 60, 12)
    assert picture is not None
    upper, lower = (next(row for row in picture.chars if letter in row)[GUTTER:] for letter in "BA")
    blank = {" ", "┈"}
    assert not blank & set(lower) and len([cell for cell in upper if cell in blank]) >= 10


def test_marks_and_nan_steps_are_in_place() -> None:
    picture = draw(plot(curve(*range(11)), last=10, marks=[(5, 5.0), (50, 1.0)], bad=array("q", [10])), 41, 9)
    assert picture is not None and plain(picture).count("◆") == 1
    assert picture.chars[-2][-1] == "✗" and {"mark", "bad"} <= looks(picture)


def test_background_curve_shows_around_the_front_one() -> None:
    noise = curve(*[(-1.0) ** x for x in range(300)], ground=True)
    assert {"ground0", "run0"} <= looks(draw(plot(noise, curve(*[0.0] * 300), last=299), 60, 14))


@pytest.mark.parametrize(
    ("low", "high", "count", "told"),
    [
        (0.0, 1.0, 4, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.0, 1000000.0, 5, ["0", "0.2M", "0.4M", "0.6M", "0.8M", "1.0M"]),
        (999_990.0, 1_000_000.0, 2, ["999,990", "999,995", "1,000,000"]),
        (0.0, 3e-5, 3, ["0", "1e-5", "2e-5", "3e-5"]),
        (-40.0, 40.0, 2, ["-40", "-20", "0", "20", "40"]),
        (7.0, 7.0, 3, ["7"]),
    ],
)
def test_axes_have_few_round_numbers(low: float, high: float, count: int, told: list[str]) -> None:
    assert labels(ticks(low, high, count)) == told


def test_steps_on_an_axis_are_whole() -> None:
    assert labels(ticks(1.0, 4.0, 9, least=1.0)) == ["1", "2", "3", "4"]


def test_logarithmic_axis_has_powers_of_ten() -> None:
    assert decades(-4.2, 0.3, 9) == [-4.0, -3.0, -2.0, -1.0, 0.0]
    assert [round(10**value, 3) for value in decades(-0.5, 0.2, 5)] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.75, "0.750"), (12345.0, "12.35k"), (1e-5, "1e-5"), (0.0, "0.000"), (None, "–"), (250.04, "250.0")],
)
def test_numbers_take_few_characters(value: float | None, told: str) -> None:
    assert short(value) == told and len(told) <= 8
