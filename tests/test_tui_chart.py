"""The Braille curve: any values, any number of them, any box."""

from __future__ import annotations

import math

import pytest
from rich.text import Text

from lorad.tui.chart import BUCKETS, Series, draw


def curve(*values: float) -> Series:
    series = Series()
    for x, y in enumerate(values):
        series.add(x, y)
    return series


def plain(lines: list[Text]) -> str:
    return "\n".join(text.plain for text in lines)


@pytest.mark.parametrize("values", [(), (math.nan,), (0.5,), (math.nan, 1.0, math.inf, 2.0), (-1e30, 1e30)])
@pytest.mark.parametrize("size", [(0, 0), (1, 1), (12, 3), (80, 20)])
def test_a_curve_of_any_values_fits_any_box(values: tuple[float, ...], size: tuple[int, int]) -> None:
    lines = draw(curve(*values), [(0.0, math.nan), (0.0, 0.5)], *size)
    assert len(lines) <= max(size[1], 1)
    assert size[0] < 20 or all(text.cell_len <= size[0] for text in lines)


def test_a_curve_of_nan_only_says_that_there_is_nothing() -> None:
    assert plain(draw(curve(math.nan, math.nan), [], 40, 10)) == "nothing to draw yet"


def test_a_long_curve_stays_small_and_keeps_its_spikes() -> None:
    values = [0.0] * 100_000
    values[54_321] = 7.0
    series = curve(*values)
    assert len(series.buckets) <= BUCKETS
    assert max(bucket.high for bucket in series.buckets) == 7.0
    assert plain(draw(series, [], 60, 10)).startswith("7 ")


def test_merged_stretches_cover_every_point_once() -> None:
    series = curve(*(float(n) for n in range(BUCKETS * 3 + 5)))
    assert [b.low for b in series.buckets][1:] == [b.high + 1 for b in series.buckets][:-1]
