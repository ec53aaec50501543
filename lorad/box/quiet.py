"""Quiet hours: times of the week, by the clock on the wall, in which devices belong to others than runs."""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WRITTEN = re.compile(r"(?:([a-z,-]+) +)?(\d{1,2}):(\d{2}) *- *(\d{1,2}):(\d{2})")
_LONGEST = 14  # windows that follow each other without a gap are looked through so far


class _Window(NamedTuple):
    """Quiet hours that begin on some days of the week (0 is Monday), and may end on the day after."""

    days: frozenset[int]
    begin: timedelta
    length: timedelta


def parse(text: str) -> _Window:
    """Read `mon-fri 09:00-18:00`, `sat,sun 22:00-06:00` or `12:00-13:30`. Raises ValueError."""
    match = _WRITTEN.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no time of the week: write it as 'mon-fri 09:00-18:00'")
    days, *clock = match.groups()
    hours, minutes, to_hours, to_minutes = map(int, clock)
    begin = timedelta(hours=hours, minutes=minutes)
    end = timedelta(hours=to_hours, minutes=to_minutes)
    whole = timedelta(days=1)
    if max(minutes, to_minutes) > 59 or begin >= whole or end > whole:
        raise ValueError(f"{text!r} has a time that no clock shows")
    if begin == end:
        raise ValueError(f"{text!r} is empty: a whole day is 00:00-24:00")
    numbers: set[int] = set()
    for part in days.split(",") if days else ["mon-sun"]:
        first, _, last = part.partition("-")
        if first not in _DAYS or (last or first) not in _DAYS:
            raise ValueError(f"{text!r}: {part} is no day; they are {', '.join(_DAYS)}")
        first_number = _DAYS.index(first)
        count = (_DAYS.index(last or first) - first_number) % 7 + 1
        numbers |= {(first_number + step) % 7 for step in range(count)}
    return _Window(frozenset(numbers), begin, end - begin if end > begin else end - begin + whole)


def quiet_until(windows: Sequence[_Window], at: float) -> float | None:
    """Find when the quiet hours end in which a Unix time lies; None where it lies in none.

    Hours that the clock shows twice, when summer time ends, are quiet both times; skipped ones are not
    missed.
    """
    until = None
    for _ in range(_LONGEST):
        moment = at if until is None else until
        now = datetime.fromtimestamp(moment)
        ends = []
        for window in windows:
            for day in (now.date(), now.date() - timedelta(days=1)):
                begin = datetime.combine(day, datetime.min.time()) + window.begin
                end = (begin + window.length).replace(fold=1)
                is_within = (
                    begin <= now.replace(fold=0) < end or begin.timestamp() <= moment < end.timestamp()
                )
                if day.weekday() in window.days and is_within:
                    ends.append(max(end.timestamp(), end.replace(fold=0).timestamp()))
                    break
        if not ends:
            break
        until = max(ends)
    return until
