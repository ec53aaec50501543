"""Tell people in words what a process does, and what the daemon does while somebody waits for its answer."""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from lorad.protocol.heartbeat import phase
from lorad.text import duration

_SOON = 2.0  # seconds that are not worth mentioning


@dataclass
class Activity:
    """What somebody is doing, in words, and when that phase of it began. Times are monotonic."""

    words: str
    since: float

    def hear(self, words: str, now: float) -> None:
        if phase(words) != phase(self.words):
            self.since = now
        self.words = words

    def in_words(self, now: float) -> str:
        """Say what is being done, and for how long already where the words do not say how far it is."""
        seconds = now - self.since
        is_enough = not self.words or phase(self.words) != self.words or seconds < _SOON
        return self.words if is_enough else f"{self.words}, {duration(seconds)}"


@dataclass
class _Doing:
    """What a request is doing at the moment. Any thread may tell it."""

    _activity: Activity = field(default_factory=lambda: Activity("", time.monotonic()))
    _follows: Callable[[], str] | None = None

    def tell(self, words: str, follows: Callable[[], str] | None = None) -> None:
        """Say what comes next.

        follows: says it in more detail, as soon as it returns anything.
        """
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
    """Return where this request says what it is doing; outside of a request nobody hears of it."""
    return _DOING.get() or _Doing()
