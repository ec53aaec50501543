"""Groups that wait for rows of a decode batch, in two lines: of parties that go first, and of all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from lorad.engines.builtin.calls import Call, Group


class Waiting:
    """Iterates over all, those that go first before the others."""

    def __init__(self) -> None:
        self.first: deque[Group] = deque()
        self.others: deque[Group] = deque()

    def __bool__(self) -> bool:
        return bool(self.first or self.others)

    def __iter__(self) -> Iterator[Group]:
        return chain(self.first, self.others)

    def add(self, call: Call) -> None:
        (self.first if call.goes_first else self.others).extend(call.groups)

    def put_back(self, group: Group) -> None:
        """Put a group back at the head of its line."""
        (self.first if group.call.goes_first else self.others).appendleft(group)

    def drop_aborted(self) -> None:
        for line in (self.first, self.others):
            left = [group for group in line if not group.call.aborted]
            line.clear()
            line.extend(left)

    def samples(self, enough: int) -> int:
        """Count the waiting samples, but no further than `enough`."""
        count = 0
        for group in self:
            count += len(group.samples)
            if count > enough:
                break
        return count
