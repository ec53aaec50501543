"""Text for people: numbers, sizes, times, and strings that come from somewhere else.

Standard library only.
"""

import re
import time
from typing import Any

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def printable(text: str) -> str:
    """Text without control characters: no terminal escapes from models, logs or users."""
    return "".join(c if c in "\n\t" or (c.isprintable()) else f"\\x{ord(c):02x}" for c in text)


def one_line(text: str) -> str:
    """`printable`, and line breaks and tabs become spaces."""
    return printable(" ".join(text.split()))


def number(value: Any, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def size(count: float | None) -> str:
    """1536 -> 1.5 KiB."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def age(then: float | None) -> str:
    """How long ago a Unix time was."""
    return "" if then is None else duration(time.time() - then)


def coarse_age(then: float | None) -> str:
    """How long ago a Unix time was, so that it changes at most once a minute: <1m, 12m, 5h, 3d."""
    if then is None:
        return ""
    minutes = int(time.time() - then) // 60
    if minutes < 1:
        return "<1m"
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h" if minutes < 2880 else f"{minutes // 1440}d"


def moment(then: float, now: float | None = None) -> str:
    """Name a Unix time by this machine's clock: 14:05 today, `Thu 14:05` in this week, else with its day."""
    at, today = time.localtime(then), time.localtime(time.time() if now is None else now)
    if at[:3] == today[:3]:
        return time.strftime("%H:%M", at)
    is_near = 0 < then - time.mktime(today) < 6 * 86400
    return time.strftime("%a %H:%M" if is_near else "%Y-%m-%d %H:%M", at)


def seconds_of(text: str) -> float:
    """Read numbers with units, as `duration` writes them, and weeks: 90s, 1h05m, 2w."""
    return sum(float(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[\d.]+[smhdw]", text))


def duration(seconds: float) -> str:
    """75 -> 1m15s."""
    whole = max(int(seconds), 0)
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
