"""Text for people: numbers, sizes, times, and strings that come from somewhere else.

Standard library only.
"""

import re
import time
from collections.abc import Iterable
from typing import Any

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
SPECIAL = re.compile(  # tokens that chat templates write
    r"<\|[^|<>\s]{1,48}\|>|<[｜][^<>｜]{1,48}[｜]>|</?(?:s|pad|unk|bos|eos|think|tool_call|tool_response"
    r"|start_of_turn|end_of_turn|im_start|im_end)>|\[/?(?:INST|TOOL_CALLS|ARGS|CALL_ID)\]"
)
_LAST = 8192  # characters at the end of a prompt in which the last turn is looked for
_AUTHOR = re.compile(r"\s*(?:(?:user|human|tool)\n\s*)?")  # that a template writes before a turn


def printable(text: str) -> str:
    """Return text without control characters: no terminal escapes from models, logs or users."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def one_line(text: str) -> str:
    """Return the printable text with spaces for line breaks and tabs."""
    return printable(" ".join(text.split()))


def some_of(names: Iterable[object], most: int = 20) -> str:
    """List names, long ones cut, and say how many more there are; "nothing" where there is none."""
    words = [f"{name!s:.60}" for name in names]
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more or "nothing"


def clauses(*parts: str) -> str:
    """Join the parts that are not empty by semicolons, without full stops between them."""
    kept = [part for part in parts if part]
    return "; ".join([*(part.removesuffix(".") for part in kept[:-1]), *kept[-1:]])


def last_turn(prompt: str) -> tuple[int, int]:
    """Return where the last turn of a rendered prompt begins and ends, without the generation prompt."""
    start = 0
    end = len(prompt)
    for token in reversed([*SPECIAL.finditer(prompt, max(len(prompt) - _LAST, 0))]):
        if prompt[token.end() : end].strip() not in ("", "assistant", "model"):
            author = _AUTHOR.match(prompt, token.end())
            start = token.end() if author is None else author.end()
            break
        end = token.start()
    end = start + len(prompt[start:end].rstrip())
    return (start, end) if start < end else (0, len(prompt))


def question(prompt: str) -> str:
    """Return the last turn of a prompt, to be shown in a row: the template and earlier turns are left out."""
    start, end = last_turn(prompt)
    return f"{'…' if start else ''}{prompt[start:end]}"


def counted(count: int, noun: str) -> str:
    """Write a number with its noun: 1 run, 2 runs."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def number(value: Any, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def size(count: float | None) -> str:
    """Write a number of bytes: 1536 is 1.5 KiB."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def age(then: float | None) -> str:
    """Say how long ago a Unix time was."""
    return "" if then is None else duration(time.time() - then)


def coarse_age(then: float | None) -> str:
    """Say how long ago a Unix time was, in words that change once a minute at most: <1m, 12m, 5h, 3d."""
    if then is None:
        return ""
    minutes = int(time.time() - then) // 60
    if minutes < 1:
        return "<1m"
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h" if minutes < 2880 else f"{minutes // 1440}d"


def moment(then: float, now: float | None = None) -> str:
    """Name a Unix time by this machine's clock: 14:05 today, `Thu 14:05` in this week, else with its day."""
    at = time.localtime(then)
    today = time.localtime(time.time() if now is None else now)
    if at[:3] == today[:3]:
        return time.strftime("%H:%M", at)
    is_near = 0 < then - time.mktime(today) < 6 * 86400
    return time.strftime("%a %H:%M" if is_near else "%Y-%m-%d %H:%M", at)


def seconds_of(text: str) -> float:
    """Read numbers with units, as `duration` writes them, and weeks: 90s, 1h05m, 2w."""
    return sum(float(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[\d.]+[smhdw]", text))


def duration(seconds: float) -> str:
    """Write seconds: 75 is 1m15s."""
    whole = max(int(seconds), 0)
    days = whole // 86400
    hours = whole // 3600 % 24
    minutes = whole // 60 % 60
    rest = whole % 60
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
