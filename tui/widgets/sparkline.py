"""Numbers as a line of bars."""

import math
from collections.abc import Sequence
from typing import TypeGuard

_BARS = "▁▂▃▄▅▆▇█"
_NONE = "·"  # stands for what is no number


def sparkline(values: Sequence[float | None] | None, width: int) -> str:
    """The last `width` values, from the least to the largest of them; all alike: half as high, at 0 or below
    low.
    """
    last = list(values or ())[-width:]
    numbers = [value for value in last if _is_number(value)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    return "".join(_bar(value, low, high) if _is_number(value) else _NONE for value in last)


def _is_number(value: float | None) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _bar(value: float, low: float, high: float) -> str:
    halves = high / 2 - low / 2  # their difference is finite
    part = (value / 2 - low / 2) / halves if high > low else 0.5 * (value > 0)
    return _BARS[min(int(part * len(_BARS)), len(_BARS) - 1)]
