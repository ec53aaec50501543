"""Lays out a histogram of samples: what stands where, for pictures and for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from lorad.client.histogram import AmountSpread
from lorad.tui.curves.axes import bare
from lorad.tui.curves.plot import names

_FILLED = 0.9  # of the width of a bin


@dataclass(frozen=True)
class BarChart:
    """The content of a histogram, whose bins are 1 wide.

    Attributes:
        bars: The place of the run, the left end, the width and the height of each bar; heights are shares of
            the samples of its run.
        ticks: Where x is named, and how.
    """

    title: str
    bars: Sequence[tuple[int, float, float, float]]
    ticks: Sequence[tuple[float, str]]
    bins: int

    @property
    def highest(self) -> float:
        return max((height for *_, height in self.bars), default=1.0)


def title_of(metric: str) -> str:
    """Name an amount of samples."""
    return "tokens sampled" if metric == "length" else names(metric)[1]


def bar_chart(spreads: Sequence[AmountSpread]) -> BarChart:
    """Lay out one amount of the samples of runs, counted in the same bins, with the bars side by side."""
    bins = spreads[0].bins
    width = _FILLED / len(spreads)
    bars = [
        (place, number + (1 - _FILLED) / 2 + place * width, width, part.count / spread.counted)
        for place, spread in enumerate(spreads)
        for number, part in enumerate(spread.bins if spread.counted else ())
    ]
    ticks = [
        (number if part.low < part.high else number + 0.5, bare(part.low)) for number, part in enumerate(bins)
    ]
    if bins and bins[-1].low < bins[-1].high:
        ticks.append((len(bins), bare(bins[-1].high)))
    title = f"{title_of(spreads[0].metric)}: share of the samples"
    return BarChart(title, bars, ticks, len(bins))
