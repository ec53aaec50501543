"""The newest events, read and encoded once for all who follow them."""

from collections import deque
from itertools import accumulate, takewhile
from typing import NamedTuple

import msgspec

from lorad.bounds import STREAM_BYTES
from lorad.records.runs import Event
from lorad.store import events
from lorad.store.db import Store

_PAGE = 16  # events read from the database at a time: many who are behind take turns
KEPT_LINES = 4096
_KEPT_BYTES = 8 << 20


class Line(NamedTuple):
    """One event as followers get it."""

    id: int
    run: str | None
    text: bytes


class Tail:
    """The newest events. Followers who are further behind read the database, page by page."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lines: deque[Line] = deque()
        self._bytes = 0
        self._before = self.newest = events.last_id(store)  # ids; the lines are those after and up to them

    def after(self, cursor: int, run: str | None) -> list[Line]:
        """Read some events with larger ids, in order; [] when there is none up to `newest`.

        run: whose events they are, without those of a removed run of the same name; None for all.
        """
        while rows := events.after(self._store, self.newest, None, _PAGE):
            for line in map(line_of, rows):
                self._lines.append(line)
                self._bytes += len(line.text)
            self.newest = self._lines[-1].id
            while len(self._lines) > KEPT_LINES or (self._bytes > _KEPT_BYTES and len(self._lines) > 1):
                gone = self._lines.popleft()
                self._before = gone.id
                self._bytes = self._bytes - len(gone.text)
        if cursor < self._before and (rows := events.after(self._store, cursor, run, _PAGE)):
            return [line_of(row) for row in rows]
        # from the newest back: most followers lack only a few
        later = list(takewhile(lambda line: line.id > cursor, reversed(self._lines)))
        lines = [line for line in reversed(later) if run in (None, line.run)]
        if lines and run is not None:
            first = events.first_id(self._store, run)
            lines = [line for line in lines if line.id >= first]
        sizes = accumulate(len(line.text) for line in lines)
        return [line for line, size in zip(lines, sizes, strict=True) if size - len(line.text) < STREAM_BYTES]

    def forget(self) -> None:
        """Forget the lines: the run of some events was renamed."""
        self._lines.clear()
        self._before = self.newest
        self._bytes = 0


def line_of(row: Event) -> Line:
    return Line(row.id, row.run, msgspec.json.encode(row) + b"\n")
