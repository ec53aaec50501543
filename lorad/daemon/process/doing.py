"""Tells people in words what a process does, and what the daemon does while somebody waits for its answer."""

import time
from collections.abc import Callable
from contextvars import ContextVar

from lorad.protocol.heartbeat import phase
from lorad.text import duration

_SOON = 2.0  # seconds that are not worth mentioning


class Activity:
    """Words, and since when they are of one phase. Times are of the monotonic clock."""

    def __init__(self, words: str, now: float) -> None:
        self._words = words
        self._since = now

    def hear(self, words: str, now: float) -> None:
        if phase(words) != phase(self._words):
            self._since = now
        self._words = words

    def in_words(self, now: float) -> str:
        """Say what is being done: how far it is, or else for how long already."""
        words = self._words
        seconds = now - self._since
        is_told = not words or phase(words) != words or seconds < _SOON
        return words if is_told else f"{words}, {duration(seconds)}"


class _Doing:
    """What a request does at the moment. Any thread may tell."""

    def __init__(self) -> None:
        self._activity = Activity("", time.monotonic())
        self._follows: Callable[[], str] | None = None

    def tell(self, words: str, follows: Callable[[], str] | None = None) -> None:
        """Say what comes next. follows: says more, as soon as it says anything."""
        self._activity.hear(words, time.monotonic())
        self._follows = follows

    def in_words(self) -> str:
        more = self._follows() if self._follows is not None else ""
        return more or self._activity.in_words(time.monotonic())


_DOING: ContextVar[_Doing | None] = ContextVar("doing", default=None)


def begin_telling() -> _Doing:
    """Return what `doing` returns from now on, in this task and in the tasks that it starts."""
    doing = _Doing()
    _DOING.set(doing)
    return doing


def doing() -> _Doing:
    """Return what the present request tells whoever waits for it; nobody hears of any other."""
    return _DOING.get() or _Doing()
