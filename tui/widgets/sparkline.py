"""Numbers as a line of bars."""

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

Scale = tuple[float, float]  # the least and the largest value
_BARS = "▁▂▃▄▅▆▇█"
_NONE = "·"  # stands for what is no number


def sparkline(values: Sequence[float | None] | None, width: int, scale: Scale | None = None) -> str:
    """The last `width` values, from the least to the largest of them; all alike: half as high, at 0 or below
    low. scale: from that least to that largest value instead.
    """
    last = list(values or ())[-width:]
    low, high = scale or span([last]) or (0.0, 0.0)
    return "".join(_bar(value, low, high) if _is_number(value) else _NONE for value in last)


def span(lines: Iterable[Sequence[float | None]]) -> Scale | None:
    """Return the least and the largest of all values; None where there is no number."""
    numbers = [value for line in lines for value in line if _is_number(value)]
    return (min(numbers), max(numbers)) if numbers else None


def _is_number(value: float | None) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _bar(value: float, low: float, high: float) -> str:
    halves = high / 2 - low / 2  # their difference is finite
    part = (value / 2 - low / 2) / halves if high > low else 0.5 * (value > 0)
    return _BARS[max(min(int(part * len(_BARS)), len(_BARS) - 1), 0)]
