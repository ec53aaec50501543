"""Round numbers along an axis, and numbers in few characters."""

import math

from lorad.text import duration

_CLOSER = 0.7  # rather more numbers than wanted than fewer
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def ticks(low: float, high: float, count: int, *, least: float = 0.0) -> list[float]:
    """Return about `count` round numbers within low..high, at least `least` apart."""
    if not high > low or count < 1:
        return [low]
    rough = max((high - low) / count, least)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0.0 else 0.0
    if power <= 0.0 or not math.isfinite(high - low):
        return [low]
    steps = [power * m for m in (0.5, 1, 2, 5, 10) if power * m >= least]
    at = next(i for i, step in enumerate(steps) if step >= rough * _CLOSER)
    marks = _multiples(steps[at], low, high)
    return marks if len(marks) > 1 or not at else _multiples(steps[at - 1], low, high)


def _multiples(step: float, low: float, high: float) -> list[float]:
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float, count: int) -> list[float]:
    """Return round numbers of a logarithmic axis; all are exponents of ten."""
    whole = [float(n) for n in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    if len(whole) >= 2:
        return whole[:: max(1, -(-len(whole) // max(count, 1)))]
    marks = [n + math.log10(m) for n in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high] or [low, high][:count]


_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def x_ticks(axis: str, low: float, high: float, count: int) -> tuple[list[float], list[str]]:
    """Return about `count` round places of x, and how they are written."""
    if axis != "time":
        at = ticks(low, high, count, least=1.0)
        return at, labels(at)
    rough = (high - low) / 1000 / max(count, 1) * _CLOSER
    seconds = next((time for time in _TIMES if time >= rough), math.ceil(rough / 86400) * 86400)
    at = _multiples(seconds * 1000.0, low, high) or [low]
    return at, [x_text(axis, place) for place in at]


def x_text(axis: str, x: float) -> str:
    """Write a place on an axis: 1,200 steps, 1.2M tokens, 2h05m."""
    if axis == "step":
        return f"{round(x):,}"
    if axis == "tokens":
        return bare(x)
    text = duration(x / 1000)
    return text[:-3] if len(text) > 3 and text.endswith(("00s", "00m", "00h")) else text


def labels(values: list[float]) -> list[str]:
    """Return the labels of ticks, all with the same digits and unit."""
    if len(values) < 2:
        return [bare(value) for value in values]
    step = abs(values[1] - values[0])
    most = max(abs(value) for value in values)
    if most >= 1e15 or most < 1e-3:
        return [
            _tidy(f"{value:.{max(0, _whole(most) - _whole(step))}e}") if value else "0" for value in values
        ]
    unit, sign = next(((u, s) for u, s in _SUFFIXES if most >= u * (10 if s == "k" else 1)), (1.0, ""))
    digits = max(0, -_whole(step / unit))
    if sign and digits > 2:
        return [f"{value:,.{max(0, -_whole(step))}f}" for value in values]
    return [f"{value / unit:.{digits}f}{sign}" if value else "0" for value in values]


def _whole(value: float) -> int:
    """Return the exponent of ten of a value."""
    return math.floor(math.log10(value) + 1e-9) if value > 0.0 else 0


def short(value: float | None) -> str:
    """Format a number in at most 8 characters, three after the point where that is precise enough."""
    if value is None:
        return "–"
    size = abs(value)
    if not math.isfinite(value):
        return "NaN"
    if size >= 1e4 and size < 1e15:
        unit, sign = next((u, s) for u, s in _SUFFIXES if size >= u)
        return f"{value / unit:.4g}{sign}" if size / unit < 999.95 else f"{value / unit:.0f}{sign}"
    if size >= 1e15 or 0.0 < size < 1e-3:
        return _tidy(f"{value:.2e}" if value > 0 else f"{value:.1e}")
    return f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def bare(value: float) -> str:
    """Format a number as `short` does, without zeros at the end."""
    text = short(value)
    return text.rstrip("0").rstrip(".") if "." in text and text[-1].isdigit() and "e" not in text else text


def _tidy(text: str) -> str:
    """Shorten a number with an exponent: 1.00e-05 becomes 1e-5."""
    digits, _, power = text.partition("e")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{digits}e{int(power)}"
