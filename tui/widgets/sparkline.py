"""Numbers as a line of bars."""

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

Scale = tuple[float, float]  # the least and the largest value
_BARS = "▁▂▃▄▅▆▇█"
_NONE = "·"  # stands for what is no number


def sparkline(values: Sequence[float | None] | None, width: int, scale: Scale | None = None) -> str:
    """Draw the last `width` values, from the least to the largest of them or of a scale.

    Where all are alike, the bars are half as high, and low at 0 or below.
    """
    last = list(values or ())[-width:]
    low, high = scale or span([last]) or (0.0, 0.0)
    halves = high / 2 - low / 2  # their difference is finite
    bars = ""
    for value in last:
        if _is_number(value):
            part = (value / 2 - low / 2) / halves if high > low else 0.5 * (value > 0)
            bars += _BARS[max(min(int(part * len(_BARS)), len(_BARS) - 1), 0)]
        else:
            bars += _NONE
    return bars


def span(lines: Iterable[Sequence[float | None]]) -> Scale | None:
    """Return the least and the largest of all values; None where there is no number."""
    numbers = [value for line in lines for value in line if _is_number(value)]
    return (min(numbers), max(numbers)) if numbers else None


def _is_number(value: float | None) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
